"""AST rewriting of user functions, so that the examples of vmap can diverge and reconverge."""

from forall._ast_rewrite.convert import Template as Template
from forall._ast_rewrite.convert import runs_with as runs_with
from forall._ast_rewrite.convert import template as template
from forall._ast_rewrite.unsupported import Refused as Refused
