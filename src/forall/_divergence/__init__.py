"""Divergence: the runtime of converted code, with control flow and values that differ by lane."""

from forall._divergence.runtime import Refusal as Refusal
from forall._divergence.runtime import convert as convert
from forall._divergence.runtime import convert_if_running as convert_if_running
from forall._divergence.runtime import is_running as is_running
from forall._divergence.thread_state import thread as thread
from forall._divergence.user_code import convert_libraries as convert_libraries
