// kafkajs behind the commands that program.py tells of.

const readline = require('readline')
const { Kafka, CompressionTypes, logLevel } = require('kafkajs')

const PATIENCE_MS = 30000
const QUIET_MS = 400
const REBALANCED = ['REBALANCE_IN_PROGRESS', 'ILLEGAL_GENERATION', 'UNKNOWN_MEMBER_ID']

const kafkaAt = (server) => new Kafka({ brokers: [server], logLevel: logLevel.NOTHING })
const text = (data) => (data === null || data === undefined ? '-' : '=' + Buffer.from(data).toString('base64'))
const bytes = (word) => (word === '-' ? null : Buffer.from(word.slice(1), 'base64'))

function told (partition, message) {
  const headers = Object.entries(message.headers || {}).map(([name, value]) => `${name};${text(value)}`)
  return [
    partition, message.offset, message.timestamp, text(message.key), text(message.value), headers.join(',')
  ].join(':')
}

async function withAdmin (server, work) {
  const admin = kafkaAt(server).admin()
  await admin.connect()
  try {
    return await work(admin)
  } finally {
    await admin.disconnect()
  }
}

async function write (server, topic, codec, acks, idempotent, ...records) {
  const producer = kafkaAt(server).producer({ idempotent: idempotent === '1' })
  await producer.connect()
  try {
    const messages = records.map((record) => {
      const [partition, timestamp, key, value, headers] = record.split(':')
      const pairs = headers ? headers.split(',').map((header) => header.split(';')) : []
      return {
        partition: Number(partition), timestamp, key: bytes(key), value: bytes(value),
        headers: Object.fromEntries(pairs.map(([name, word]) => [name, bytes(word)]))
      }
    })
    const compression = codec === 'gzip' ? CompressionTypes.GZIP : CompressionTypes.None
    const placed = await producer.send({ topic, messages, compression, acks: acks === 'all' ? -1 : Number(acks) })
    const next = new Map((placed || []).map((one) => [one.partition, Number(one.baseOffset)]))
    return messages.map(({ partition }) => {
      const offset = next.has(partition) ? next.get(partition) : -1
      if (next.has(partition)) next.set(partition, offset + 1)
      return `${partition}:${offset}`
    })
  } finally {
    await producer.disconnect()
  }
}

// Everything it is given, until there are so many, and for a moment longer: there may be one too many.
async function read (server, topic, count, committed) {
  const group = `reader-${process.hrtime.bigint()}`
  const consumer = consumerAt(server, group, { readUncommitted: committed !== '1' })
  const found = []
  let last = Date.now()
  await consumer.connect()
  try {
    await consumer.subscribe({ topics: [topic], fromBeginning: true })
    await consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        found.push(told(partition, message))
        last = Date.now()
      }
    })
    await until(() => found.length >= Number(count) && Date.now() - last > QUIET_MS, found)
  } finally {
    await consumer.disconnect()
  }
  return found
}

async function consume (server, group, topic, count) {
  const consumer = consumerAt(server, group, {})
  const found = []
  const first = new Map()
  const next = new Map()
  const forget = () => {
    found.length = 0
    first.clear()
    next.clear()
  }
  consumer.on(consumer.events.GROUP_JOIN, forget) // what was read and not committed comes again
  await consumer.connect()
  try {
    await consumer.subscribe({ topics: [topic], fromBeginning: true })
    await consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        if (found.length < Number(count)) {
          found.push(told(partition, message))
          if (!first.has(partition)) first.set(partition, message.offset)
          next.set(partition, String(BigInt(message.offset) + 1n))
        }
      }
    })
    while (true) {
      await until(() => found.length >= Number(count), found)
      try {
        await consumer.commitOffsets([...next].map(([partition, offset]) => ({ topic, partition, offset })))
        break
      } catch (error) {
        if (!REBALANCED.includes((error.cause || error).type)) throw error
        for (const [partition, offset] of first) consumer.seek({ topic, partition, offset })
        forget()
      }
    }
  } finally {
    await consumer.disconnect()
  }
  return found
}

async function member (server, group, topic) {
  const consumer = consumerAt(server, group, {})
  // Where a commit says that it is no member any more, before a heartbeat does, it ends for good: whoever uses it begins anew.
  consumer.on(consumer.events.CRASH, ({ payload }) => {
    if (!payload.restart) member(server, group, topic)
  })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  await consumer.run({
    autoCommit: false,
    eachMessage: async ({ partition, message }) => {
      const offset = String(BigInt(message.offset) + 1n)
      await consumer.commitOffsets([{ topic, partition, offset }])
      console.log(`${partition} ${message.offset} ${text(message.value)}`)
    }
  })
}

function consumerAt (server, group, settings) {
  return kafkaAt(server).consumer({
    groupId: group, sessionTimeout: 1000, rebalanceTimeout: 5000, heartbeatInterval: 200, maxWaitTimeInMs: 200, ...settings
  })
}

async function until (what, found) {
  const ends = Date.now() + PATIENCE_MS
  while (!what()) {
    if (Date.now() > ends) throw new Error(`only ${found.length} records came in time`)
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}

const commands = {
  write,
  read,
  consume,
  create: (server, topic, numPartitions, ...config) => withAdmin(server, async (admin) => {
    const configEntries = config.map((pair) => ({ name: pair.split('=')[0], value: pair.split('=')[1] }))
    const isNew = await admin.createTopics({ topics: [{ topic, numPartitions: Number(numPartitions), configEntries }] })
    if (!isNew) throw new Error('it exists')
    return []
  }),
  time: (server, topic, partition, timestamp) => withAdmin(server, async (admin) => {
    // It answers the end where there is no such record.
    const found = await admin.fetchTopicOffsetsByTimestamp(topic, Number(timestamp))
    const ends = await admin.fetchTopicOffsets(topic)
    const of = (offsets) => offsets.find((one) => one.partition === Number(partition)).offset
    return [of(found) === of(ends) ? '-1' : of(found)]
  }),
  lag: (server, groupId, topic) => withAdmin(server, async (admin) => {
    const [committed] = await admin.fetchOffsets({ groupId, topics: [topic] })
    const ends = new Map((await admin.fetchTopicOffsets(topic)).map((one) => [one.partition, Number(one.offset)]))
    const known = committed.partitions.filter((one) => Number(one.offset) >= 0)
    return known.map((one) => `${one.partition}:${ends.get(one.partition) - Number(one.offset)}`)
  }),
  trim: (server, topic, partition, offset) => withAdmin(server, async (admin) => {
    await admin.fetchTopicOffsets(topic) // or it does not know the topic
    await admin.deleteTopicRecords({ topic, partitions: [{ partition: Number(partition), offset }] })
    return []
  }),
  delete: (server, topic) => withAdmin(server, async (admin) => {
    await admin.deleteTopics({ topics: [topic] })
    return []
  }),
  delete_group: (server, group) => withAdmin(server, async (admin) => {
    await admin.deleteGroups([group])
    return []
  })
}

async function main () {
  if (process.argv.length > 2) return member(...process.argv.slice(3))
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [name, ...words] = line.split(' ')
    try {
      for (const answer of await commands[name](...words)) console.log(answer)
      console.log('.')
    } catch (error) {
      console.log(`! ${[error, ...(error.errors || [])].join(': ')}`.replace(/\n/g, ' '))
    }
  }
}

main()
