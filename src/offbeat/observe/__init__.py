"""Seeing what a run does: journals, metrics, callbacks, the console and sinks for other tools."""

from offbeat.observe.callbacks import (
    Callback,
    CheckpointInfo,
    CollectorLostInfo,
    EvalInfo,
    FinishInfo,
    RoundInfo,
    RunControl,
    RunInfo,
    RunSummary,
    WorkerLostInfo,
)
from offbeat.observe.console import make_console, preview
from offbeat.observe.events import EventLog, ScheduleLog, read_events, read_rounds, read_schedule
from offbeat.observe.journal import component_statistics
from offbeat.observe.logs import close_log, debug_ticket, open_log
from offbeat.observe.meter import Meter
from offbeat.observe.sinks import Sink, SinkList, check_sinks, make_sinks
from offbeat.observe.system import SystemMonitor

__all__ = [
    "Callback",
    "CheckpointInfo",
    "CollectorLostInfo",
    "EvalInfo",
    "EventLog",
    "FinishInfo",
    "Meter",
    "RoundInfo",
    "RunControl",
    "RunInfo",
    "RunSummary",
    "ScheduleLog",
    "Sink",
    "SinkList",
    "SystemMonitor",
    "WorkerLostInfo",
    "check_sinks",
    "close_log",
    "component_statistics",
    "debug_ticket",
    "make_console",
    "make_sinks",
    "open_log",
    "preview",
    "read_events",
    "read_rounds",
    "read_schedule",
]
