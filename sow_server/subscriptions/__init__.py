"""Subscriptions: snapshot, then live, without a gap (rules S1 to S7). Knows neither gRPC nor protobuf.

    hub = Hub(store, …)                      one for the server: follows the writer, knows who is subscribed
    subscription = hub.subscribe(request)    a subscriber's side, driven step by step
    async for frame in stream(subscription, …)

From the writer outwards: `dispatch` takes every commit once it is durable, `changes` decodes a change no further than
somebody asks, `matching` finds the filters it concerns, `focus` says what that means to a subscriber, `frames` holds it
until it is sent. Who cannot keep up is served by `replay` from the journal.
"""
