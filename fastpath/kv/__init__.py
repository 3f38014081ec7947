"""Keys and values in pages: which exist (geometry), whose they are (pages, tables), and where (cache).

geometry.py   pages and bytes of a model's cache, before it is made
pages.py      PagePool: free pages, owners counted
tables.py     PageTable: a lane's pages of one kind of layers
cache.py      KVCache: all of it, with the memory
integrity.py  check_integrity: is every page owned as it is counted?
prefix_*.py   PrefixTree: pages of earlier sequences that later ones begin with
"""
