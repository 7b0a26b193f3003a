"""AST rewriting of user functions, so that the examples of vmap can diverge and reconverge."""

from forall._ast_rewrite.convert import CodeTemplate as CodeTemplate
from forall._ast_rewrite.convert import find_template as find_template
from forall._ast_rewrite.convert import set_runtime as set_runtime
from forall._ast_rewrite.unsupported import Refusal as Refusal
