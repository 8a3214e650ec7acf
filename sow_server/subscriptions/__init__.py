"""Subscriptions: a snapshot, then the changes, without a gap (rules S1 to S7). Knows neither gRPC nor protobuf.

    hub = Hub(reads, writes, …)              one for the server: follows the writer, knows all subscriptions
    subscription = hub.subscribe(request)    one subscriber's side, driven step by step
    async for frame in stream(subscription, …)

The way of a commit: `dispatch` takes it once it is durable. `changes` decodes each change only as far as needed.
`matching` finds the filters that a change may concern, and `focus` tells which message each subscriber gets. `frames`
holds the messages, and an `outbox` keeps them until they are sent. A subscriber that cannot keep up is served by
`replay` from the journal. `consumer_registry` adds durable subscriptions on top.
"""
