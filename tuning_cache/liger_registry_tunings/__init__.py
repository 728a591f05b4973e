"""Tables measured on real devices, shipped with the package; data alone, found through an entry point, never imported.

``v1/<vendor>/<arch>/<sku>-<units>/<op>.json``; README.md beside this package says how they were measured.
"""
