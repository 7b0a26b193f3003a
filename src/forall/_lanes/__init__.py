"""Where examples part ways: Python's control flow, numbers and containers, one for each lane."""

from forall._lanes.libraries import deeply as deeply
from forall._lanes.runtime import Refused as Refused
from forall._lanes.runtime import convert as convert
from forall._lanes.runtime import is_running as is_running
from forall._lanes.runtime import users as users
from forall._lanes.state import thread as thread
