/* The optimizer of a recorded case, in profile deepspeed. */
#ifndef TOOLS_REPLAY_CREATE_H
#define TOOLS_REPLAY_CREATE_H

#include "onebit/optimizer.h"
#include "tools/replay/case.h"

/* The call that makes it, for words. */
const char *replay_create_name(const struct replay_case *recorded);

/* Makes it of the case's tensors; collective. */
onebit_status_t replay_create(const struct replay_case *recorded, onebit_comm_t comm,
                              const onebit_tensor_t *tensors, onebit_device_t device,
                              onebit_optimizer_t *optimizer);

#endif
