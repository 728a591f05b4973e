"""One page about what was chosen, measured and missed: ``collect`` reads the tables, ``page`` writes the HTML.

Nothing here is imported before ``liger-tune report`` runs; jinja2 and matplotlib come with the extra ``report``.
"""

from __future__ import annotations
