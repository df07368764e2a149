// From topic to topic, exactly once, by kafkajs: copy.js BOOTSTRAP FROM TO, like confluent_copy.py.

const { Kafka, logLevel } = require('kafkajs')

const [server, source, target] = process.argv.slice(2)
const kafka = new Kafka({ brokers: [server], logLevel: logLevel.WARN })
const producer = kafka.producer({ transactionalId: 'copy', maxInFlightRequests: 1, idempotent: true })
const consumer = kafka.consumer({ groupId: 'copy', sessionTimeout: 3000, heartbeatInterval: 300 })

async function copy (topic, partition, messages, keep) {
  const transaction = await producer.transaction()
  try {
    const copies = messages.map(({ key, value }) => ({ key, value, partition }))
    await transaction.send({ topic: target, messages: copies })
    const offset = (BigInt(messages[messages.length - 1].offset) + 1n).toString()
    const topics = [{ topic, partitions: [{ partition, offset }] }]
    await transaction.sendOffsets({ consumerGroupId: 'copy', topics })
  } catch (error) {
    await transaction.abort()
    throw error
  }
  await (keep ? transaction.commit() : transaction.abort())
  console.log(keep ? `committed ${messages.length}` : 'aborted')
}

async function main () {
  await producer.connect()
  // First: what its predecessor left open is aborted, and positions are final. It begins with its first transaction.
  await (await producer.transaction()).abort()
  await consumer.connect()
  await consumer.subscribe({ topics: [source], fromBeginning: true })
  let turn = 0
  await consumer.run({
    autoCommit: false,
    eachBatchAutoResolve: false,
    eachBatch: async ({ batch, resolveOffset, heartbeat, isRunning, isStale }) => {
      for (let first = 0; first < batch.messages.length && isRunning() && !isStale(); first += 50) {
        const messages = batch.messages.slice(first, first + 50)
        if (++turn % 5 === 0) await copy(batch.topic, batch.partition, messages, false)
        await copy(batch.topic, batch.partition, messages, true)
        resolveOffset(messages[messages.length - 1].offset)
        await heartbeat()
      }
    }
  })
}

// What went wrong ends it, and it is started again: kafkajs goes on with the positions that it has in memory.
consumer.on(consumer.events.CRASH, ({ payload }) => { console.error(payload.error); process.exit(1) })
main().catch((error) => { console.error(error); process.exit(1) })
