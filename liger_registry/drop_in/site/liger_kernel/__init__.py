"""The names of liger-kernel 0.8.5, which liger-registry answers in commands run by ``liger-tune exec``."""

from liger_registry.drop_in.finder import serve

serve(__name__)
