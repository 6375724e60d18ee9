"""The tasks of the course, in their order."""

from zmpi.course.accounting import QUESTIONS
from zmpi.course.collectives import TASK_1
from zmpi.course.gather_free import TASK_5
from zmpi.course.own_communicator import TASK_8
from zmpi.course.prefetching import TASK_7
from zmpi.course.replicas import TASK_2
from zmpi.course.sharded_adam import TASK_3
from zmpi.course.sharded_gradients import TASK_4
from zmpi.course.uneven_tied import TASK_6

TASKS = {
    task.number: task
    for task in (
        TASK_1,
        TASK_2,
        TASK_3,
        TASK_4,
        TASK_5,
        TASK_6,
        TASK_7,
        TASK_8,
        QUESTIONS,
    )
}
