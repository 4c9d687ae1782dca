"""Data that lie elsewhere: object stores, read through a local cache of pieces.

`urls` names a place, `objects` talks to the servers, `requests` keeps many reads in flight and tries again, `index` is the
cache's book of pieces and their budget, `pieces` fetches and keeps them, `remote` makes one file of its pieces, `ahead`
fetches what the plan will ask for, `hydrate` copies a whole set beforehand.
"""
