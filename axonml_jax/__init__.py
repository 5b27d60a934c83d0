"""Parallel training for any Flax model in JAX: sharding specs over a mesh, explicit collectives, PyTorch-like facades.

This file is the register of public names.
"""

from axonml_jax.collectives.buckets import GradientBucket as GradientBucket
from axonml_jax.collectives.buckets import GradSyncStrategy as GradSyncStrategy
from axonml_jax.collectives.exchange import all_to_all as all_to_all
from axonml_jax.collectives.exchange import send_recv as send_recv
from axonml_jax.collectives.gather import all_gather as all_gather
from axonml_jax.collectives.gather import gather as gather
from axonml_jax.collectives.join import join as join
from axonml_jax.collectives.objects import all_gather_object as all_gather_object
from axonml_jax.collectives.objects import broadcast_object as broadcast_object
from axonml_jax.collectives.ops import ReduceOp as ReduceOp
from axonml_jax.collectives.point_to_point import barrier as barrier
from axonml_jax.collectives.point_to_point import recv as recv
from axonml_jax.collectives.point_to_point import send as send
from axonml_jax.collectives.queries import get_rank as get_rank
from axonml_jax.collectives.queries import get_world_size as get_world_size
from axonml_jax.collectives.queries import is_main_process as is_main_process
from axonml_jax.collectives.reduce import all_reduce as all_reduce
from axonml_jax.collectives.reduce import all_reduce_max as all_reduce_max
from axonml_jax.collectives.reduce import all_reduce_mean as all_reduce_mean
from axonml_jax.collectives.reduce import all_reduce_min as all_reduce_min
from axonml_jax.collectives.reduce import all_reduce_product as all_reduce_product
from axonml_jax.collectives.reduce import all_reduce_sum as all_reduce_sum
from axonml_jax.collectives.reduce_scatter import reduce_scatter as reduce_scatter
from axonml_jax.collectives.reduce_scatter import reduce_scatter_mean as reduce_scatter_mean
from axonml_jax.collectives.reduce_scatter import reduce_scatter_sum as reduce_scatter_sum
from axonml_jax.collectives.scatter import broadcast as broadcast
from axonml_jax.collectives.scatter import scatter as scatter
from axonml_jax.collectives.spmd import spmd as spmd
from axonml_jax.collectives.sync import sync_gradient as sync_gradient
from axonml_jax.collectives.sync import sync_gradients as sync_gradients
from axonml_jax.collectives.synchronizer import GradientSynchronizer as GradientSynchronizer
from axonml_jax.data.loader import create_dataloader as create_dataloader
from axonml_jax.data.sampler import DistributedSampler as DistributedSampler
from axonml_jax.facade.ddp import DDP as DDP
from axonml_jax.facade.fsdp import FSDP as FSDP
from axonml_jax.facade.memory import FSDPMemoryStats as FSDPMemoryStats
from axonml_jax.facade.parallel_model import ParallelModel as ParallelModel
from axonml_jax.facade.parallelize import make_train_step as make_train_step
from axonml_jax.facade.parallelize import parallelize as parallelize
from axonml_jax.facade.trainer import Trainer as Trainer
from axonml_jax.ledger.explain import explain as explain
from axonml_jax.logging import logger as logger
from axonml_jax.logging import print0 as print0
from axonml_jax.logging import seed as seed
from axonml_jax.mesh.backend import Backend as Backend
from axonml_jax.mesh.fake_devices import fake_devices as fake_devices
from axonml_jax.mesh.group import ProcessGroup as ProcessGroup
from axonml_jax.mesh.init import init as init
from axonml_jax.mesh.init import shutdown as shutdown
from axonml_jax.mesh.shape import MeshShape as MeshShape
from axonml_jax.mesh.shape import make_mesh as make_mesh
from axonml_jax.mesh.spawn import spawn as spawn
from axonml_jax.mesh.world import MockBackend as MockBackend
from axonml_jax.mesh.world import World as World
from axonml_jax.model.loss import WeightedMean as WeightedMean
from axonml_jax.model.precision import Precision as Precision
from axonml_jax.parallel.ddp import Replicate as Replicate
from axonml_jax.parallel.fsdp import Shard as Shard
from axonml_jax.parallel.fsdp import ShardingStrategy as ShardingStrategy
from axonml_jax.parallel.offload import CPUOffload as CPUOffload
from axonml_jax.parallel.pipeline.memory_stats import PipelineMemoryStats as PipelineMemoryStats
from axonml_jax.parallel.pipeline.schedule import PipelineSchedule as PipelineSchedule
from axonml_jax.parallel.plan import Plan as Plan
from axonml_jax.parallel.strategy import AbstractStrategy as AbstractStrategy
from axonml_jax.training.state import TrainState as TrainState
from axonml_jax.training.step import TrainStep as TrainStep

__version__ = "0.1.0"
