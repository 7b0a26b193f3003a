"""The source of a user's function, rewritten so that its examples can part and meet again."""

from forall._source.converting import Template as Template
from forall._source.converting import runs_with as runs_with
from forall._source.converting import template as template
from forall._source.refused import Refused as Refused
