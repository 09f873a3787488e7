// Takes an order and sends its message in one transaction: both are committed, or neither.
//
//     PGQUEUE_DSN=postgresql://… node producer.js ORDER_ID [CARD]

import pg from 'pg';

const [order_id, card] = process.argv.slice(2);
const client = new pg.Client({ connectionString: process.env.PGQUEUE_DSN });
await client.connect();
try {
  await client.query('begin');
  await client.query('insert into orders (order_id) values ($1)', [order_id]);
  // Always JSON.stringify: `pg` sends an array of JavaScript as an array of PostgreSQL, and a string as it is.
  const { rows } = await client.query('select pgqueue.enqueue($1, $2, headers => $3, dedup_key => $4) as id', [
    'orders',
    JSON.stringify({ order_id: Number(order_id), card }),
    JSON.stringify({ event: 'created' }),
    `order-${order_id}`,
  ]);
  await client.query('commit');
  console.log(`sent ${rows[0].id}`); // an id is a bigint, which `pg` returns as a string
} finally {
  await client.end(); // without a commit, this rolls back
}
