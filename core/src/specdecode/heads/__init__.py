"""What methods with weights of their own share: keys, vocabularies, draft trees.

:mod:`.config`, :mod:`.fields`, :mod:`.topology`, :mod:`.tokenizers` and :mod:`.vocabulary` serve while a
method is planned and import no torch; :mod:`.layers` and :mod:`.loading` while it is loaded, :mod:`.drawing`
and :mod:`.trees` while it runs. :mod:`.files` writes checkpoints, :mod:`.untrained` makes weights for tests.
"""
