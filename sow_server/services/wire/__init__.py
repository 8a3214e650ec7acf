"""Between messages of the contract and the values of the store. Protobuf is read and written here."""
