// Claims the messages of a queue, handles several at a time, and acknowledges each in the transaction of its effects.
//
//     PGQUEUE_DSN=postgresql://… node worker.js
//
// A message whose handler fails is delivered again after the queue's backoff, and becomes a dead letter after the last
// attempt. That of a worker that was killed is delivered again when the visibility timeout of the queue ends. SIGTERM and
// Ctrl-C end the worker after the messages that it handles. It connects again when the connection breaks.

import pg from 'pg';

const QUEUE = 'orders';
const CONCURRENCY = 4;

/** The message can never succeed: it becomes a dead letter at once. */
class Reject extends Error {}

/** The work for one message, by statements of `client`, whose transaction also acknowledges the message. */
async function handle(client, message) {
  const { order_id, card } = message.payload;
  if (!Number.isSafeInteger(order_id)) throw new Reject('no order_id');
  if (card === 'declined') throw new Error('card declined');
  await client.query('insert into shipped (order_id) values ($1)', [order_id]);
}

const options = { connectionString: process.env.PGQUEUE_DSN, application_name: 'worker.js', keepAlive: true };
const pool = new pg.Pool({ ...options, max: CONCURRENCY + 1 }); // one connection for claims and extensions
const onError = (error) => console.error(`a connection has ended: ${error.message}`);
pool.on('error', onError);

const running = new Set(); // a promise for each message that is being handled
let extendEvery = 10_000; // ms; a third of the visibility timeout of the queue
let stopping = false;
let failure = null; // of the connection that listens
let woken = false; // there may be something to do
let wake = () => {
  woken = true;
};

for (const signal of ['SIGTERM', 'SIGINT']) {
  process.once(signal, () => {
    stopping = true;
    wake();
  });
}

/** Wait until `wake` is called, or for so many seconds. */
async function sleep(seconds) {
  await new Promise((resolve) => {
    const timer = setTimeout(resolve, Math.min(1000 * seconds, 2 ** 31 - 1));
    wake = () => {
      woken = true;
      clearTimeout(timer);
      resolve();
    };
    if (woken) wake();
  });
  woken = false;
}

async function claim() {
  if (running.size === CONCURRENCY) return [];
  // `select * from`: a function of a row in the list of columns would return one column with text.
  const call = 'select * from pgqueue.claim($1, max_messages => $2, claimed_by => $3)';
  const { rows } = await pool.query(call, [QUEUE, CONCURRENCY - running.size, `node-${process.pid}`]);
  return rows;
}

/** Handle a message, and settle it. */
async function work(message) {
  const claimed = [QUEUE, message.id, message.claim_token];
  const client = await pool.connect();
  client.on('error', onError); // without a listener, the end of its session would end the process
  const extension = setInterval(() => {
    pool.query('select pgqueue.extend($1, $2, $3)', claimed).catch((error) => console.error(error.message));
  }, extendEvery);
  let broken;
  try {
    await client.query('begin');
    await handle(client, message);
    const { rows } = await client.query('select pgqueue.ack($1, $2, $3) as acknowledged', claimed);
    if (!rows[0].acknowledged) throw new Error('the claim was lost: another worker has the message');
    await client.query('commit');
    console.log(`message ${message.id} is done`);
  } catch (error) {
    console.error(`message ${message.id}, attempt ${message.attempt_count}: ${error.message}`);
    try {
      await client.query('rollback');
      // Without a delay the backoff of the queue applies. If the claim was lost, these return false and change nothing.
      const verb = error instanceof Reject ? 'reject' : 'nack';
      await client.query(`select pgqueue.${verb}($1, $2, $3, error => $4)`, [...claimed, error.message]);
    } catch (second) {
      broken = second; // the message is delivered again when its visibility timeout ends
    }
  } finally {
    clearInterval(extension);
    client.off('error', onError);
    client.release(broken);
  }
}

function start(message) {
  const done = work(message)
    .catch((error) => console.error(`message ${message.id}: ${error.message}`))
    .finally(() => {
      running.delete(done);
      wake();
    });
  running.add(done);
}

/** Claim messages until the worker stops, or until the connection `listener` breaks. */
async function consume(listener) {
  const settings = `select pgqueue.channel(name) as channel, extract(epoch from visibility_timeout)::float8 as visible
    from pgqueue.get_queue($1)`;
  const { channel, visible } = (await listener.query(settings, [QUEUE])).rows[0];
  extendEvery = (1000 * visible) / 3;
  await listener.query(`listen ${pg.escapeIdentifier(channel)}`);
  let seconds = null; // how long to wait if the next claim finds nothing
  while (!stopping) {
    if (failure) throw failure;
    const messages = await claim();
    messages.forEach(start);
    if (messages.length > 0) {
      seconds = null;
    } else if (running.size === CONCURRENCY) {
      await sleep(60);
    } else if (seconds === null) {
      // From here on a new message notifies. One that came before is found by the next claim.
      const wait = 'select extract(epoch from pgqueue.prepare_wait($1) - clock_timestamp())::float8 as seconds';
      seconds = (await listener.query(wait, [QUEUE])).rows[0].seconds;
    } else {
      await sleep(Math.max(seconds, 0));
      seconds = null;
    }
  }
}

while (!stopping) {
  const listener = new pg.Client(options);
  failure = null;
  listener.on('notification', () => wake());
  listener.on('error', (error) => {
    failure = error;
    wake();
  });
  try {
    await listener.connect();
    await consume(listener);
  } catch (error) {
    console.error(`${error.message}; tries again`);
    await sleep(1);
  } finally {
    await listener.end().catch(() => {});
  }
}
await Promise.all(running);
await pool.end();
