// Drives one peer of Node: worker.mjs PEER WORK, both JSON. Says "ready" when it is connected, waits for a line, works,
// and prints [messages, seconds, latencies in ms], or "dry" where messages ran out.
import { once } from 'node:events'
import { createInterface } from 'node:readline'

const [peer, work] = process.argv.slice(2).map((word) => JSON.parse(word))

const peers = {
  'pg-boss': async () => {
    const { PgBoss } = await import('pg-boss')
    const boss = new PgBoss({
      connectionString: peer.dsn, max: work.clients, supervise: false, schedule: false, migrate: work.verb === 'setup'
    })
    boss.on('error', (error) => { throw error })
    await boss.start()
    return {
      setup: () => boss.createQueue(peer.queue),
      enqueue: (data) => data.length === 1
        ? boss.send(peer.queue, data[0])
        : boss.insert(peer.queue, data.map((each) => ({ data: each }))),
      take: async (number) => {
        const jobs = await boss.fetch(peer.queue, { batchSize: number })
        if (jobs.length) await boss.complete(peer.queue, jobs.map((job) => job.id))
        return jobs.length
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
      close: () => utils.release()
    }
  }
}

const session = await peers[peer.name]()

async function client (until) {
  const data = Array(work.batch).fill(JSON.parse(work.payload))
  const latencies = []
  for (let began; (began = performance.now()) < until;) {
    if (work.verb !== 'take') await session.enqueue(data)
    if (work.verb !== 'enqueue' && await session.take(work.batch) === 0) throw new Error('dry')
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

let result
try {
  if (work.verb === 'setup') result = await session.setup()
  else if (work.verb === 'fill') result = await fill()
  else {
    const go = once(createInterface({ input: process.stdin }), 'line')
    console.log('"ready"')
    await go
    result = await measure()
  }
} catch (error) {
  if (error.message !== 'dry') throw error
  result = 'dry'
}
console.log(JSON.stringify(result ?? null))
await session.close()
process.exit()
