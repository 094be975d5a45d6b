/* Tests wrong calls of onebit/cuda.h and onebit/nccl.h, which must return an error with a message.
 * The handles are NULL, destroyed, of another kind, or of plans on the host. */
#include "onebit/cuda.h"
#include "tests/gpu/harness.h"
#include "tests/support_wrong_calls.h"

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/nccl.h"
#endif

#define ARGUMENT ONEBIT_ERROR_ARGUMENT

static void check_wrong_plan(onebit_plan_t plan, const char *part) {
  uint64_t made, skipped;
  float x = 0, y = 0;
  WRONG(onebit_allreduce_stream, (&x, &y, plan, NULL), ARGUMENT, part);
  WRONG(onebit_allgather_stream, (&x, &y, plan, NULL), ARGUMENT, part);
  WRONG(onebit_reduce_scatter_stream, (&x, &y, plan, NULL), ARGUMENT, part);
  WRONG(onebit_scale_result_stream, (&y, 2, plan, NULL), ARGUMENT, part);
  WRONG(onebit_plan_reset_residual_stream, (plan, NULL), ARGUMENT, part);
  WRONG(onebit_plan_get_calls, (plan, &made, &skipped), ARGUMENT, part);
}

static void are_errors_with_a_message(void) {
  struct wrong_scene scene;
  if (!CHECK(wrong_scene_make(&scene), "no scene: %s", onebit_last_error()))
    return;
  void *comm = scene.comm, *plan = scene.plan;
  float rate = 0.1F;
  check_wrong_plan(NULL, "plan is NULL");
  check_wrong_plan(scene.no_plan, "not a plan that exists (it is destroyed, or was never created)");
  check_wrong_plan(comm, "which is a communicator");
  check_wrong_plan(scene.plan, "host");
  WRONG(onebit_plan_get_calls, (plan, NULL, NULL), ARGUMENT, "made is NULL");
  WRONG(onebit_plan_synchronize, (NULL), ARGUMENT, "plan is NULL");
  WRONG(onebit_plan_synchronize, (scene.no_plan), ARGUMENT, "not a plan that exists");
  WRONG(onebit_plan_synchronize, (comm), ARGUMENT, "which is a communicator");
  WRONG(onebit_plan_synchronize, (scene.busy), ONEBIT_ERROR_BUSY, "in flight");
#define STEPS(handle, part)                                                                        \
  WRONG(onebit_optimizer_step_stream, (handle, 0.1F, NULL), ARGUMENT, part);                       \
  WRONG(onebit_optimizer_begin_stream, (handle, 0.1F, NULL), ARGUMENT, part);                      \
  WRONG(onebit_optimizer_ready_stream, (handle, 0, NULL), ARGUMENT, part);                         \
  WRONG(onebit_optimizer_set_learning_rate_pointer, (handle, &rate), ARGUMENT, part);              \
  WRONG(onebit_optimizer_synchronize, (handle), ARGUMENT, part)
  STEPS(NULL, "optimizer is NULL");
  STEPS(scene.no_optimizer, "not an optimizer that exists (it is destroyed, or was never created)");
  STEPS(plan, "which is a plan");
  WRONG(onebit_optimizer_step_stream, (scene.optimizer, 0.1F, NULL), ARGUMENT, "for host memory");
  WRONG(onebit_optimizer_begin_stream, (scene.optimizer, 0.1F, NULL), ARGUMENT, "for host memory");
  WRONG(onebit_optimizer_ready_stream, (scene.optimizer, 0, NULL), ARGUMENT, "for host memory");
  WRONG(onebit_optimizer_set_learning_rate_pointer, (scene.optimizer, &rate), ARGUMENT,
        "for host memory");
#ifdef ONEBIT_HAVE_NCCL
  onebit_comm_t made;
  WRONG(onebit_comm_create_nccl, (NULL, &made), ARGUMENT, "nccl_comm is NULL");
  CHECK(wrong_check_header("nccl") == 1, "nccl.h declares other functions");
#endif
  wrong_scene_end(&scene);
  CHECK(wrong_check_header("cuda") == 12, "cuda.h declares other functions");
  CHECK(wrong_calls_failed() == 0, "%zu of %zu went otherwise", wrong_calls_failed(),
        wrong_calls_made());
}

static const struct gpu_test tests[] = {
    {"are errors with a message", are_errors_with_a_message, NO_DEVICE}};
GPU_SUITE("wrong calls", tests)
