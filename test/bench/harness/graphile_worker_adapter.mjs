// graphile-worker with its own worker, as its documentation shows. It deletes jobs that succeeded.
import { readFileSync } from 'node:fs'
import { Logger, makeWorkerUtils, run } from 'graphile-worker'
import { complain, main } from './protocol.mjs'

const TASK = 'work'
const DEPTH = 'select count(*)::int as depth from graphile_worker.jobs where locked_at is null and run_at <= now()'
const logger = new Logger(() => (level, message) => { if (level === 'error') complain('graphile-worker', message) })
let settings, utils

await main({
  name: 'graphile-worker',
  version: JSON.parse(readFileSync(new URL('node_modules/graphile-worker/package.json', import.meta.url))).version,
  eventTables: ['graphile_worker._private_jobs'],
  async open (given) {
    settings = given
    utils = await makeWorkerUtils({ preset: { worker: { connectionString: settings.url, maxPoolSize: 2, logger } } })
    await utils.migrate()
  },
  enqueue: (payloads) => utils.addJobs(payloads.map((payload) => ({ identifier: TASK, payload }))),
  async depth () {
    const { rows } = await utils.withPgClient((client) => client.query(DEPTH))
    return rows[0].depth
  },
  async work (handle) {
    const runner = await run({
      preset: {
        worker: {
          connectionString: settings.url,
          concurrentJobs: settings.workers,
          maxPoolSize: settings.workers + 2,
          logger
        }
      },
      noHandleSignals: true,
      taskList: { [TASK]: handle }
    })
    runner.promise.then(
      () => { console.error('the worker ended by itself'); process.exit(1) },
      (error) => { console.error(error); process.exit(1) }
    )
  }
})
