"""Tables of the store, by aggregate: columns, mapping to records and queries of each in one module."""
