"""The licences that the Hub knows by an id, and which of them one merge may pass on unasked.

The ids are those of its documentation's page on licences (hub-docs, repositories-licenses).
"""

from __future__ import annotations

PERMISSIVE = frozenset(
    """
    apache-2.0 mit afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear cc0-1.0 cc-by-2.0
    cc-by-2.5 cc-by-3.0 cc-by-4.0 cdla-permissive-1.0 cdla-permissive-2.0 ecl-2.0 isc ms-pl ncsa odc-by openmdw-1.0
    pddl postgresql unlicense wtfpl zlib
    """.split()  # noqa: SIM905
)
"""Licences that ask for no more than a notice."""

KNOWN = PERMISSIVE | frozenset(
    """
    openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m c-uda
    cc cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0
    cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
    agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 lgpl-lr h-research intel-research lppl-1.3c apple-ascl
    apple-amlr mpl-2.0 odbl osl-3.0 ofl-1.1 deepfloyd-if-license fair-noncommercial-research-license llama2 llama3
    llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown other
    """.split()  # noqa: SIM905
)
"""The ids that a card's `license` may have; `other` needs a name and a link."""
