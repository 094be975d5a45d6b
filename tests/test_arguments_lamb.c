/* Options of 1-bit LAMB: each wrong once, each another on one rank; and memory that is not
 * there. */
#include <criterion/criterion.h>
#include <math.h>

#include "base/memory.h"
#include "onebit/lamb.h"
#include "tests/support.h"

TestSuite(arguments_lamb, .timeout = 60);

#define COUNT 700
static float parameter[COUNT], gradient[COUNT]; /* where several ranks are, no step is made */

static onebit_comm_t self(void) {
  onebit_comm_t comm;
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK, "%s", onebit_last_error());
  return comm;
}

static onebit_status_t create(onebit_comm_t comm, const onebit_lamb_options_t *options,
                              onebit_optimizer_t *optimizer) {
  onebit_tensor_t tensors[] = {{parameter, gradient, 300, 0.01f, 0, 0},
                               {NULL, NULL, 0, 0, 0, 0},
                               {parameter + 300, gradient + 300, COUNT - 300, 0, 0, 0}};
  return onebit_lamb_create(comm, tensors, 3, options, optimizer);
}

#define LAMB(...)                                                                                  \
  { .size = sizeof(onebit_lamb_options_t), __VA_ARGS__ }
static const struct {
  const char *name, *value;
  onebit_lamb_options_t options;
} wrong_options[] = {
    {"size", "0", {.size = 0}},
    {"beta1", "1", LAMB(.beta1 = 1)},
    {"beta2", "-1", LAMB(.beta2 = -1)},
    {"epsilon", "nan", LAMB(.epsilon = NAN)},
    {"freeze_threshold", "1", LAMB(.freeze_threshold = 1)},
    {"max_coefficient", "-10", LAMB(.max_coefficient = -10)},
    {"max_coefficient", "nan", LAMB(.max_coefficient = NAN)},
    {"max_coefficient", "inf", LAMB(.max_coefficient = INFINITY)},
    {"min_coefficient", "-0.01", LAMB(.min_coefficient = -0.01)},
    {"min_coefficient", "11", LAMB(.min_coefficient = 11)},
    {"max_coefficient", "0.001", LAMB(.max_coefficient = 0.001)},
    {"coefficient_beta", "1", LAMB(.coefficient_beta = 1)},
    {"coefficient_beta", "-0.9", LAMB(.coefficient_beta = -0.9)},
    {"max_factor", "-4", LAMB(.max_factor = -4)},
    {"min_factor", "nan", LAMB(.min_factor = NAN)},
    {"min_factor", "5", LAMB(.min_factor = 5)},
    {"max_factor", "0.4", LAMB(.max_factor = 0.4)},
    {"factor_change", "1", LAMB(.factor_change = 1)},
    {"factor_change", "1.5", LAMB(.factor_change = 1.5)},
    {"factor_change", "-0.1", LAMB(.factor_change = -0.1)},
    {"factor_change", "nan", LAMB(.factor_change = NAN)},
    {"block_size", "40", LAMB(.common.block_size = 40)},
    {"bucket_size", "7", LAMB(.common.profile = ONEBIT_PROFILE_DEEPSPEED, .common.bucket_size = 7)},
};

Test(arguments_lamb, options) {
  onebit_comm_t comm = self();
  for (size_t k = 0; k < sizeof wrong_options / sizeof wrong_options[0]; k++) {
    onebit_optimizer_t optimizer = (onebit_optimizer_t)(void *)parameter;
    check_case("options %zu, wrong %s", k, wrong_options[k].name);
    CHECK_STATUS(create(comm, &wrong_options[k].options, &optimizer), ONEBIT_ERROR_ARGUMENT);
    CHECK_WORDS(wrong_options[k].name);
    CHECK_WORDS(wrong_options[k].value);
    CHECK(optimizer == NULL, "a failed creation left an optimizer");
  }
  onebit_comm_destroy(comm);
  checks_must_hold();
}

Test(arguments_lamb, create) {
  onebit_comm_t comm = self();
  onebit_optimizer_t optimizer = (onebit_optimizer_t)(void *)parameter;
  CHECK_STATUS(create(NULL, NULL, &optimizer), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("comm is NULL");
  CHECK(optimizer == NULL, "a failed creation left an optimizer");
  CHECK_STATUS(create(comm, NULL, NULL), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("optimizer is NULL");
  CHECK_STATUS(onebit_lamb_create(comm, NULL, 1, NULL, &optimizer), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("tensors is NULL");
  CHECK_STATUS(onebit_lamb_create(comm, NULL, SIZE_MAX, NULL, &optimizer), ONEBIT_ERROR_MEMORY);
  CHECK_WORDS("tensors");
  CHECK_STATUS(create(comm, NULL, &optimizer), ONEBIT_OK);
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
  checks_must_hold();
}

static const struct {
  const char *name;
  onebit_lamb_options_t options;
} other_options[] = {
    {"beta1", LAMB(.beta1 = 0.8)},
    {"beta2", LAMB(.beta2 = 0.8)},
    {"epsilon", LAMB(.epsilon = 1e-6)},
    {"freeze_step", LAMB(.freeze_step = 3)},
    {"freeze_threshold", LAMB(.freeze_threshold = 0.5)},
    {"no_bias_correction", LAMB(.no_bias_correction = 1)},
    {"max_coefficient", LAMB(.max_coefficient = 0.3)},
    {"min_coefficient", LAMB(.min_coefficient = 0.2)},
    {"coefficient_beta", LAMB(.coefficient_beta = 0.8)},
    {"max_factor", LAMB(.max_factor = 3)},
    {"min_factor", LAMB(.min_factor = 0.2)},
    {"factor_change", LAMB(.factor_change = 0.2)},
    {"profile", LAMB(.common.profile = ONEBIT_PROFILE_DEEPSPEED)},
};

static void disagree(onebit_comm_t comm, void *context) {
  const int *culprit = context;
  bool guilty = onebit_comm_rank(comm) == *culprit;
  onebit_optimizer_t optimizer = NULL;
  for (size_t k = 0; k < sizeof other_options / sizeof other_options[0]; k++) {
    check_case("rank %d has another %s", *culprit, other_options[k].name);
    CHECK_STATUS(create(comm, guilty ? &other_options[k].options : NULL, &optimizer),
                 ONEBIT_ERROR_MISMATCH);
    CHECK_WORDS(other_options[k].name);
    CHECK(optimizer == NULL, "a failed creation left an optimizer");
  }
  check_case("rank %d wants 1-bit Adam", *culprit);
  onebit_tensor_t tensor = {parameter, gradient, COUNT, 0, 0, 0};
  CHECK_STATUS(guilty ? onebit_adam_create(comm, &tensor, 1, NULL, &optimizer)
                      : onebit_lamb_create(comm, &tensor, 1, NULL, &optimizer),
               ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("kind of optimizer");
  meet(comm);
}

Test(arguments_lamb, other_options_on_one_rank) {
  for (int rank = 0; rank < 3; rank++)
    on_ranks(3, disagree, &rank);
}

/* Every allocation of a creation fails once. */
static void create_until_it_works(onebit_comm_t comm, const onebit_lamb_options_t *options) {
  onebit_status_t status = ONEBIT_ERROR_MEMORY;
  long n = 0;
  while (status == ONEBIT_ERROR_MEMORY && n < 1000) {
    onebit_optimizer_t optimizer = (onebit_optimizer_t)(void *)parameter;
    check_case("allocation %ld fails", ++n);
    ob_memory_fail_at(n);
    status = create(comm, options, &optimizer);
    ob_memory_fail_at(0);
    CHECK((optimizer == NULL) == (status != ONEBIT_OK), "status and handle do not agree");
    onebit_optimizer_destroy(optimizer);
  }
  CHECK_STATUS(status, ONEBIT_OK);
  CHECK(n > 30, "only %ld allocations failed", n - 1);
}

static void step_without_memory(onebit_comm_t comm, const onebit_lamb_options_t *options) {
  onebit_optimizer_t optimizer = NULL;
  CHECK_STATUS(create(comm, options, &optimizer), ONEBIT_OK);
  fill_input(gradient, ONEBIT_FLOAT32, COUNT, 0, 0);
  for (int step = 0; step < 6; step++) { /* of both stages, and what lies between */
    ob_memory_fail_at(1);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
    ob_memory_fail_at(0);
  }
  onebit_optimizer_destroy(optimizer);
}

Test(arguments_lamb, without_memory) {
  onebit_comm_t comm = self();
  for (int k = 0; k < 3; k++) {
    onebit_lamb_options_t options = LAMB(.freeze_step = 3);
    options.common.block_size = k == 1 ? ONEBIT_BLOCK_BUFFER : 0;
    options.common.profile = k == 2 ? ONEBIT_PROFILE_DEEPSPEED : ONEBIT_PROFILE_DEFAULT;
    create_until_it_works(comm, &options);
    step_without_memory(comm, &options);
  }
  onebit_comm_destroy(comm);
  checks_must_hold();
}
