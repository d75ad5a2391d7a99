"""Pipeline parallelism: schedules as data, stages of layers, and their execution."""

from sbp.pipeline.builders import SCHEDULES as SCHEDULES
from sbp.pipeline.builders import build as build
from sbp.pipeline.report import Costs as Costs
from sbp.pipeline.report import Report as Report
from sbp.pipeline.report import measure as measure
from sbp.pipeline.schedule import Kind as Kind
from sbp.pipeline.schedule import Schedule as Schedule
from sbp.pipeline.schedule import Task as Task
from sbp.pipeline.schedule import from_ticks as from_ticks
from sbp.pipeline.stage import StageAssignment as StageAssignment
from sbp.pipeline.stage import assign_balanced as assign_balanced
from sbp.pipeline.stage import assign_layers as assign_layers
from sbp.pipeline.stage import assign_libai as assign_libai
from sbp.pipeline.stage import from_stage_ids as from_stage_ids
from sbp.pipeline.stage import head_cost as head_cost
from sbp.pipeline.tables import Tables as Tables
from sbp.pipeline.tables import to_tables as to_tables
from sbp.pipeline.validation import validate as validate
