// Drives one peer of Node: worker.mjs PEER WORK, both JSON. Says "ready" when it is connected, waits for a line, works,
// and prints [messages, seconds, latencies in ms], or "dry" where messages ran out. Latency has two verbs: "produce" prints
// [number, moment] of every message it sent, "consume" answers "count" and "stop", the latter by [number, moment] of every
// handler that began; moments are seconds of CLOCK_MONOTONIC.
import { once } from 'node:events'
import { createInterface } from 'node:readline'

const [peer, work] = process.argv.slice(2).map((word) => JSON.parse(word))

const peers = {
  'pg-boss': async () => {
    const { PgBoss } = await import('pg-boss')
    const boss = new PgBoss({
      connectionString: peer.dsn, max: work.clients, supervise: false, schedule: false, migrate: work.verb === 'setup',
      useListenNotify: work.verb === 'consume'
    })
    boss.on('error', (error) => { throw error })
    await boss.start()
    return {
      setup: () => boss.createQueue(peer.queue, peer.policy ? { policy: peer.policy } : {}),
      enqueue: (data) => data.length === 1
        ? boss.send(peer.queue, data[0], peer.groups ? { singletonKey: `g${random(peer.groups)}` } : {})
        : boss.insert(peer.queue, data.map((each) => ({ data: each }))),
      take: async (number) => {
        const jobs = await boss.fetch(peer.queue, { batchSize: number })
        if (jobs.length) await boss.complete(peer.queue, jobs.map((job) => job.id))
        return jobs.length
      },
      listen: async () => {
        await boss.updateQueue(peer.queue, { notify: true })
        await boss.work(peer.queue, { localConcurrency: work.clients, notifyPollingIntervalSeconds: 30 },
          async (jobs) => jobs.forEach((job) => note(job.data)))
        return () => boss.updateQueue(peer.queue, { notify: false })
      },
      close: () => boss.stop({ graceful: false })
    }
  },
  'graphile-worker': async () => {
    const { makeWorkerUtils, run, Logger } = await import('graphile-worker')
    const preset = { worker: {
      connectionString: peer.dsn, maxPoolSize: work.clients + 2, concurrentJobs: work.clients,
      logger: new Logger(() => () => {}),
      // Many at a time is a setting of the worker, not an argument: jobs are fetched and completed in batches.
      ...(work.batch > 1 ? { localQueue: { size: work.batch }, completeJobBatchDelay: 0 } : {})
    } }
    const utils = await makeWorkerUtils({ preset })
    return {
      setup: () => utils.migrate(),
      enqueue: (data) => data.length === 1
        ? utils.addJob('bench', data[0])
        : utils.addJobs(data.map((payload) => ({ identifier: 'bench', payload }))),
      // It has no verbs to fetch and to complete: its worker runs a task that does nothing.
      drain: async (seconds) => {
        let count = 0
        const start = performance.now()
        const runner = await run({ preset, noHandleSignals: true, taskList: { bench: () => { count += 1 } } })
        await new Promise((resolve) => setTimeout(resolve, seconds * 1000))
        const done = [count, (performance.now() - start) / 1000, []]
        await runner.stop()
        return done
      },
      listen: async () => {
        const runner = await run({ preset, noHandleSignals: true, taskList: { bench: note } })
        return () => runner.stop()
      },
      close: () => utils.release()
    }
  }
}

const random = (number) => Math.floor(Math.random() * number)
const monotonic = () => Number(process.hrtime.bigint()) / 1e9
const begun = []
const note = (payload) => { begun.push([payload.number, monotonic()]) }
const session = await peers[peer.name]()

async function client (until) {
  const data = Array(work.batch).fill(JSON.parse(work.payload))
  const latencies = []
  for (let began; (began = performance.now()) < until;) {
    if (work.verb !== 'take') await session.enqueue(data)
    if (work.verb !== 'enqueue' && await session.take(work.batch) === 0 && !peer.groups) throw new Error('dry')
    latencies.push(performance.now() - began)
  }
  return latencies
}

async function measure () {
  if (work.verb === 'take' && session.drain) return session.drain(work.seconds)
  const start = performance.now()
  const took = await Promise.all(Array.from({ length: work.clients }, () => client(start + work.seconds * 1000)))
  const latencies = took.flat()
  return [latencies.length * work.batch, (performance.now() - start) / 1000, latencies]
}

async function fill () {
  for (let left = work.messages; left > 0; left -= 2000) {
    await session.enqueue(Array(Math.min(left, 2000)).fill(JSON.parse(work.payload)))
  }
}

// One message a commit, evenly, by clients that take turns.
async function produce () {
  const sent = []
  const start = monotonic() + 0.2
  await Promise.all(Array.from({ length: work.clients }, async (_, place) => {
    for (let number = place; number < Math.round(work.rate * work.seconds); number += work.clients) {
      const wait = start + number / work.rate - monotonic()
      if (wait > 0) await new Promise((resolve) => setTimeout(resolve, wait * 1000))
      await session.enqueue([{ number: number + 1 }])
      sent.push([number + 1, monotonic()])
    }
  }))
  return sent
}

async function consume () {
  const end = await session.listen()
  console.log('"ready"')
  for await (const line of createInterface({ input: process.stdin })) {
    if (line === 'stop') break
    console.log(JSON.stringify([begun.length]))
  }
  await end()
  return begun
}

let result
try {
  if (work.verb === 'setup') result = await session.setup()
  else if (work.verb === 'fill') result = await fill()
  else if (work.verb === 'consume') result = await consume()
  else {
    const go = once(createInterface({ input: process.stdin }), 'line')
    console.log('"ready"')
    await go
    result = await (work.verb === 'produce' ? produce() : measure())
  }
} catch (error) {
  if (error.message !== 'dry') throw error
  result = 'dry'
}
// An exit does not wait for what a pipe has not taken yet.
await new Promise((resolve) => process.stdout.write(`${JSON.stringify(result ?? null)}\n`, resolve))
await session.close()
process.exit()
