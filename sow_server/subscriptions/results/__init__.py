"""Live results: subscriptions to the result of a query (rules S10 to S13). Knows neither gRPC nor queries.

    results = LiveResults(hub, drive, …)     one for the server
    result = results.subscribe(asked)        one subscriber's side, driven step by step like any subscription

A `source` keeps a result, by an ordinary subscription and a `window` of the best records. All that asked for the same
with the same rights follow one source. A follower is told the `difference` between the result that it was told last and
the newest one, so it needs no queue: one that is slow skips the results in between.
"""
