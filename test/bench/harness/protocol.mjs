// The adapters' side of the long-horizon harness for Node, as protocol.py: an adapter calls `main` with its system.
//
// A system has `name`, `version`, `eventTables`, and the functions `open(settings)`, `enqueue(payloads)`, `depth()` and
// `work(handle)`, which returns when the workers run.

const PERCENTILES = { p50: 0.5, p95: 0.95, p99: 0.99 }
const WINDOW = 30 // seconds that percentiles cover
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
const seconds = () => performance.now() / 1000

// The milliseconds of the last WINDOW seconds, in buckets of a thousandth.
class Latencies {
  seconds = new Map()

  add (ms, number = 1) {
    const now = Math.floor(seconds())
    if (!this.seconds.has(now)) this.seconds.set(now, new Map())
    const bucket = Math.round(1000 * Math.log(Math.max(ms, 0.01)))
    const buckets = this.seconds.get(now)
    buckets.set(bucket, (buckets.get(bucket) ?? 0) + number)
  }

  percentiles () {
    const every = new Map()
    let total = 0
    for (const [second, buckets] of this.seconds) {
      if (second <= Math.floor(seconds()) - WINDOW) {
        this.seconds.delete(second)
        continue
      }
      for (const [bucket, number] of buckets) {
        every.set(bucket, (every.get(bucket) ?? 0) + number)
        total += number
      }
    }
    const ordered = [...every].sort(([a], [b]) => a - b)
    return Object.fromEntries(Object.entries(PERCENTILES).map(([name, part]) => {
      let before = 0
      for (const [bucket, number] of ordered) {
        before += number
        if (before >= part * total) return [name, Number(Math.exp(bucket / 1000).toFixed(3))]
      }
      return [name, 0]
    }))
  }
}

const emit = (record) => process.stdout.write(`${JSON.stringify(record)}\n`)

const complained = new Map()

// Report an error on stderr, at most once a second.
export function complain (what, error) {
  if (seconds() < (complained.get(what) ?? -Infinity) + 1) return
  complained.set(what, seconds())
  console.error(`${what}: ${error}`)
}

export async function main (system) {
  const given = (name, otherwise) => Number(process.env[name] ?? otherwise)
  const settings = {
    url: process.env.DATABASE_URL,
    rate: given('PRODUCER_RATE', 800),
    depthTarget: process.env.PRODUCER_MODE === 'depth-target' ? given('TARGET_DEPTH', 1000) : null,
    batch: given('PRODUCER_BATCH_MAX', 128),
    batchMs: given('PRODUCER_BATCH_MS', 10),
    workers: given('WORKER_COUNT', 32),
    payloadBytes: given('JOB_PAYLOAD_BYTES', 256),
    workMs: given('JOB_WORK_MS', 1),
    sampleSeconds: given('SAMPLE_EVERY_S', 5),
    instance: given('BENCH_INSTANCE_ID', 0),
    rateFile: process.env.PRODUCER_RATE_CONTROL_FILE
  }
  const paced = settings.depthTarget === null && process.env.PRODUCER_PACING === 'harness'
  const { readFileSync } = await import('node:fs')
  for (const name of ['SIGTERM', 'SIGINT']) process.on(name, () => process.exit(0))

  await system.open(settings)
  emit({
    kind: 'descriptor',
    system: system.name,
    event_tables: system.eventTables,
    extensions: [],
    version: system.version,
    schema_version: system.version,
    db_name: new URL(settings.url).pathname.slice(1),
    started_at: new Date().toISOString(),
    instance_id: settings.instance
  })

  const claim = new Latencies()
  const producer = new Latencies()
  const endToEnd = new Latencies()
  let [owed, rate, enqueued, completed, depth] = [0, settings.rate, 0, 0, 0]

  async function handle (payload) {
    claim.add(Date.now() - payload.sent_ms)
    if (settings.workMs) await sleep(settings.workMs)
    endToEnd.add(Date.now() - payload.sent_ms)
    completed += 1
  }

  async function accrue (passed) {
    if (settings.depthTarget !== null) {
      if (owed < 1) owed = settings.depthTarget - await system.depth()
    } else if (!paced) {
      if (settings.rateFile) {
        try { rate = Number(readFileSync(settings.rateFile, 'utf8')) || rate } catch {} // it is being written
      }
      owed += rate * passed
    }
  }

  async function produce () {
    const padding = 'x'.repeat(Math.max(0, settings.payloadBytes - 60))
    for (let number = 0, last = seconds(); ;) {
      let behind = false
      try {
        const begin = seconds()
        await accrue(begin - last)
        last = begin
        const size = Math.min(Math.floor(owed), settings.batch)
        if (size > 0) {
          const [began, sentMs] = [seconds(), Date.now()]
          const payloads = Array.from({ length: size }, (_, n) => ({ number: number + n, sent_ms: sentMs, padding }))
          await system.enqueue(payloads)
          producer.add(1000 * (seconds() - began) / size, size)
          number += size
          enqueued += size
          owed -= size
          behind = owed >= settings.batch
        }
      } catch (error) { complain('enqueue', error) }
      await sleep(behind ? 0 : settings.batchMs)
    }
  }

  async function observe () {
    for (;;) {
      try { depth = await system.depth() } catch (error) { complain('depth', error) }
      await sleep(Math.min(250, 1000 * settings.sampleSeconds))
    }
  }

  async function sample () {
    const every = 1000 * settings.sampleSeconds
    for (let last = Date.now(), before = [enqueued, completed]; ;) {
      const due = (Math.floor(last / every) + 1) * every
      await sleep(due - Date.now())
      const now = Date.now()
      const passed = Math.max(now - last, 1) / 1000
      const values = []
      for (const [names, latencies] of [[['claim', 'subscriber'], claim], [['producer'], producer], [['end_to_end'], endToEnd]]) {
        const found = latencies.percentiles()
        for (const name of names) for (const part in found) values.push([`${name}_${part}_ms`, found[part], WINDOW])
      }
      values.push(['enqueue_rate', (enqueued - before[0]) / passed, settings.sampleSeconds])
      values.push(['completion_rate', (completed - before[1]) / passed, settings.sampleSeconds])
      if (settings.instance === 0) values.push(['queue_depth', depth, 0], ['producer_target_rate', rate, 0])
      for (const [metric, value, window] of values) {
        emit({
          t: new Date(due).toISOString(), system: system.name, kind: 'adapter', subject_kind: 'adapter', subject: '',
          metric, value, window_s: window, instance_id: settings.instance
        })
      }
      last = now
      before = [enqueued, completed]
    }
  }

  if (paced) {
    const { createInterface } = await import('node:readline')
    createInterface({ input: process.stdin }).on('line', (line) => {
      const [word, number] = line.split(' ')
      if (word === 'ENQUEUE') owed += Number(number)
    })
  }
  await system.work(handle)
  const tasks = [produce(), sample()]
  if (settings.instance === 0) tasks.push(observe())
  await Promise.all(tasks)
}
