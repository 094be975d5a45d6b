/*
 * A program that was compiled against the headers of an earlier release passes the struct sizes of
 * that release. The library must accept these sizes as long as its soname is the same. This test
 * makes a call with the size of each SIZE_type that tests/scripts/check-abi defines. If the library
 * refuses a size, the test prints the library's message and ends with status 1.
 */
#include <onebit/onebit.h>
#include <stdio.h>
#include <string.h>

static int refused;

static void expect(onebit_status_t status, const char *call) {
  if (status == ONEBIT_OK)
    return;
  printf("%s refuses the size of an earlier release: %s\n", call, onebit_last_error());
  refused = 1;
}

/* A struct as an older program knows it. Other variables of that program follow it in memory. */
#define WITH_SIZE(type, name, size_then)                                                           \
  union {                                                                                          \
    type value;                                                                                    \
    size_t size;                                                                                   \
    unsigned char bytes[sizeof(type) + 64];                                                        \
  } name;                                                                                          \
  memset(&name, 0xa5, sizeof name);                                                                \
  memset(&name, 0, (size_then));                                                                   \
  name.size = (size_then)

#define OPTIMIZER(kind, size_then)                                                                 \
  do {                                                                                             \
    onebit_optimizer_t made = NULL;                                                                \
    WITH_SIZE(onebit_##kind##_options_t, options, size_then);                                      \
    expect(onebit_##kind##_create(comm, &tensor, 1, &options.value, &made),                        \
           "onebit_" #kind "_create");                                                             \
    onebit_optimizer_destroy(made);                                                                \
  } while (0)

static void ask_optimizer(onebit_optimizer_t optimizer) {
  WITH_SIZE(onebit_optimizer_info_t, info, SIZE_onebit_optimizer_info_t);
  expect(onebit_optimizer_get_info(optimizer, &info.value), "onebit_optimizer_get_info");
  WITH_SIZE(onebit_optimizer_statistics_t, all, SIZE_onebit_optimizer_statistics_t);
  expect(onebit_optimizer_get_statistics(optimizer, &all.value), "onebit_optimizer_get_statistics");
  WITH_SIZE(onebit_tensor_statistics_t, one, SIZE_onebit_tensor_statistics_t);
  expect(onebit_optimizer_get_tensor_statistics(optimizer, 0, &one.value),
         "onebit_optimizer_get_tensor_statistics");
}

static void ask_plan(onebit_comm_t comm) {
  onebit_plan_t plan = NULL;
  WITH_SIZE(onebit_plan_options_t, options, SIZE_onebit_plan_options_t);
  expect(onebit_plan_create(comm, 64, &options.value, &plan), "onebit_plan_create");
  WITH_SIZE(onebit_plan_info_t, info, SIZE_onebit_plan_info_t);
  if (plan)
    expect(onebit_plan_get_info(plan, &info.value), "onebit_plan_get_info");
  onebit_plan_destroy(plan);
}

int main(void) {
  static float parameter[64], gradient[64];
  onebit_tensor_t tensor = {parameter, gradient, 64, 0, 0, 0};
  onebit_comm_t comm = NULL;
  onebit_optimizer_t optimizer = NULL;
  if (onebit_comm_create_self(&comm) != ONEBIT_OK)
    return 1;
  ask_plan(comm);
  OPTIMIZER(efficient_adam, SIZE_onebit_efficient_adam_options_t);
  OPTIMIZER(adam, SIZE_onebit_adam_options_t);
  OPTIMIZER(lamb, SIZE_onebit_lamb_options_t);
  OPTIMIZER(zero_one_adam, SIZE_onebit_zero_one_adam_options_t);
  OPTIMIZER(momentum, SIZE_onebit_momentum_options_t);
  OPTIMIZER(lion, SIZE_onebit_lion_options_t);
  expect(onebit_momentum_create(comm, &tensor, 1, NULL, &optimizer), "onebit_momentum_create");
  if (optimizer)
    ask_optimizer(optimizer);
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
  return refused;
}
