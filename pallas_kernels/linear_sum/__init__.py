"""A product of rows and a weight, added up over the devices that share its inputs."""

from pallas_kernels.linear_sum.api import add_parts, all_reduce, linear_sum, linear_sum_parts

__all__ = ["add_parts", "all_reduce", "linear_sum", "linear_sum_parts"]
