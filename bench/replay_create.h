/* The optimizer of a recorded case, in profile deepspeed. */
#ifndef BENCH_REPLAY_CREATE_H
#define BENCH_REPLAY_CREATE_H

#include "bench/replay_case.h"
#include "onebit/optimizer.h"

/* The call that makes it, for words. */
const char *replay_create_name(const struct replay_case *recorded);

/* Makes it of the case's tensors; collective. */
onebit_status_t replay_create(const struct replay_case *recorded, onebit_comm_t comm,
                              const onebit_tensor_t *tensors, onebit_device_t device,
                              onebit_optimizer_t *optimizer);

#endif
