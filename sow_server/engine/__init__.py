"""The store. Knows neither gRPC nor protobuf.

`Store.open` opens a data directory and builds the parts of the store. The rest of the server is handed the two doors,
`Store.reads` and `Store.writes`, or one part of them. It imports these rooms, and a few names of others
(tests/unit/project/test_engine_door.py has them):

    values, stored, formats, catalog/indexes, commit/soundness
                    the vocabulary of the engine: pure, without state
    journal, durables, loads, replicas
                    the rows and answers of these features
    pending         the answer of a change, which every change returns

This file imports nothing, so that a module without state can be imported without the store.
"""
