// pg-boss with its own workers, as its documentation shows, and notifications. It keeps completed jobs for a while.
import { readFileSync } from 'node:fs'
import { PgBoss } from 'pg-boss'
import pg from 'pg'
import { complain, main } from './protocol.mjs'

const QUEUE = 'long_horizon'
let settings, boss, pool

await main({
  name: 'pg-boss',
  version: JSON.parse(readFileSync(new URL('node_modules/pg-boss/package.json', import.meta.url))).version,
  eventTables: ['pgboss.job_common'],
  async open (given) {
    settings = given
    pool = new pg.Pool({ connectionString: settings.url, max: 1 })
    pool.on('error', (error) => complain('pool', error))
    boss = new PgBoss({ connectionString: settings.url, max: settings.workers + 2, useListenNotify: true })
    boss.on('error', (error) => complain('pg-boss', error))
    await boss.start()
    await boss.createQueue(QUEUE, { notify: true })
  },
  enqueue: (payloads) => boss.insert(QUEUE, payloads.map((data) => ({ data }))),
  async depth () {
    const { rows } = await pool.query(
      "select count(*)::int as depth from pgboss.job where name = $1 and state < 'active' and start_after <= now()", [QUEUE]
    )
    return rows[0].depth
  },
  work: (handle) => boss.work(
    QUEUE,
    { localConcurrency: settings.workers, notifyPollingIntervalSeconds: 30, batchSize: 1 },
    async (jobs) => { for (const job of jobs) await handle(job.data) }
  )
})
