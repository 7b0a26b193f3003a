"""Where examples part ways: Python's control flow, numbers and containers, one for each lane."""

from forall._lanes.runtime import Refused as Refused
from forall._lanes.runtime import convert as convert
