"""The store. Knows neither gRPC nor protobuf.

`Store.open` opens a data directory and builds the parts of the store: attributes of a `Store` such as `commits`, `cuts`
or `administration`. The rest of the server is handed the part that it needs. It imports these rooms, and a few names of
others (tests/unit/project/test_engine_door.py has them):

    values, stored, formats, catalog/indexes, commit/soundness
                    the vocabulary of the engine: pure, without state
    journal, durables, loads, replicas
                    the rows and answers of these features
    pending         the answer of a change, which every change returns

This file imports nothing, so that a module without state can be imported without the store.
"""
