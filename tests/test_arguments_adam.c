/* Each argument of an optimizer's functions wrong once, on one rank: status, words, and nothing
 * changed. Options are in test_arguments_optimizers.c. */
#include "tests/support.h"

#define COUNT 10
static float parameter[2 * COUNT + 1], gradient[2 * COUNT + 1];

static void check_wrong(onebit_status_t status, const char *name, const char *value) {
  CHECK_STATUS(status, ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS(name);
  CHECK_WORDS(value);
}

static onebit_comm_t self(void) {
  onebit_comm_t comm;
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK, "%s", onebit_last_error());
  return comm;
}

/* The second of two tensors is the wrong one. */
static const struct {
  const char *name, *value;
  onebit_tensor_t tensor;
} wrong_tensors[] = {
    {"tensors[1].parameter", "NULL", {NULL, gradient + COUNT, COUNT, 0, 0, 0}},
    {"tensors[1].parameter",
     "align",
     {(float *)(void *)((char *)(parameter + COUNT) + 2), gradient + COUNT, COUNT, 0, 0, 0}},
    {"tensors[1].gradient",
     "align",
     {parameter + COUNT, (float *)(void *)((char *)(gradient + COUNT) + 1), COUNT, 0, 0, 0}},
    {"overlap", "tensors[1]", {parameter + COUNT - 1, gradient + COUNT, COUNT, 0, 0, 0}},
    {"overlap", "tensors[1]", {parameter + COUNT, gradient + COUNT - 1, COUNT, 0, 0, 0}},
    {"overlap", "tensors[1]", {parameter + COUNT, parameter + COUNT + 1, COUNT, 0, 0, 0}},
    {"overlap", "tensors[1]", {parameter + COUNT, parameter, COUNT, 0, 0, 0}},
    {"tensors[1].weight_decay", "-1", {parameter + COUNT, gradient + COUNT, COUNT, -1, 0, 0}},
    {"tensors[1].weight_decay", "nan", {parameter + COUNT, gradient + COUNT, COUNT, NAN, 0, 0}},
    {"tensors[1].weight_decay",
     "inf",
     {parameter + COUNT, gradient + COUNT, COUNT, INFINITY, 0, 0}},
    {"tensors[1].learning_rate_factor",
     "-2",
     {parameter + COUNT, gradient + COUNT, COUNT, 0, -2, 0}},
    {"tensors[1].learning_rate_factor",
     "inf",
     {parameter + COUNT, gradient + COUNT, COUNT, 0, INFINITY, 0}},
    {"tensors[1].learning_rate_factor",
     "nan",
     {parameter + COUNT, gradient + COUNT, COUNT, 0, NAN, 0}},
    {"tensors[1].count", "18446744073709551615", {parameter, gradient, SIZE_MAX, 0, 0, 0}},
};

Test(arguments_adam, tensors) {
  onebit_comm_t comm = self();
  for (size_t k = 0; k < sizeof wrong_tensors / sizeof wrong_tensors[0]; k++) {
    onebit_optimizer_t optimizer = (onebit_optimizer_t)(void *)parameter;
    onebit_tensor_t tensors[2] = {{parameter, gradient, COUNT, 0, 0, 0}, wrong_tensors[k].tensor};
    check_case("tensor %zu, wrong %s", k, wrong_tensors[k].name);
    check_wrong(onebit_adam_create(comm, tensors, 2, NULL, &optimizer), wrong_tensors[k].name,
                wrong_tensors[k].value);
    CHECK(optimizer == NULL, "a failed creation left an optimizer");
  }
  onebit_comm_destroy(comm);
}

/* Elements of two bytes may begin at any two bytes, and at no odd one; what overlaps is counted in
 * their size. */
Test(arguments_adam, tensors_of_two_bytes) {
  static const struct {
    size_t parameter, gradient; /* bytes into the arrays */
    const char *name, *value;
  } places[] = {{2, 6, NULL, NULL},
                {3, 6, "tensors[0].parameter", "align"},
                {2, 5, "tensors[0].gradient", "align"}};
  onebit_comm_t comm = self();
  for (size_t k = 0; k < sizeof places / sizeof places[0]; k++) {
    onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
    onebit_optimizer_t optimizer = NULL;
    char *half = (char *)parameter + places[k].parameter, *from = (char *)gradient;
    onebit_tensor_t tensors[] = {{half, from + places[k].gradient, COUNT, 0, 0, 0},
                                 {half + 2 * COUNT, NULL, COUNT, 0, 0, 0}};
    options.common.parameter_dtype = ONEBIT_FLOAT16;
    options.common.gradient_dtype = ONEBIT_BFLOAT16;
    check_case("places %zu", k);
    onebit_status_t status = onebit_adam_create(comm, tensors, 2, &options, &optimizer);
    if (places[k].name)
      check_wrong(status, places[k].name, places[k].value);
    else
      CHECK_STATUS(status, ONEBIT_OK);
    onebit_optimizer_destroy(optimizer);
  }
  onebit_comm_destroy(comm);
}

Test(arguments_adam, set_gradient) {
  onebit_comm_t comm = self();
  onebit_tensor_t tensors[] = {{parameter, gradient, COUNT, 0, 0, 0}, {NULL, NULL, 0, 0, 0, 0}};
  onebit_optimizer_t optimizer = NULL;
  double scale = 0;
  CHECK_STATUS(onebit_adam_create(comm, tensors, 2, NULL, &optimizer), ONEBIT_OK);
  check_wrong(onebit_optimizer_set_gradient(NULL, 0, gradient), "optimizer", "NULL");
  check_wrong(onebit_optimizer_set_gradient(optimizer, 2, gradient), "tensor is 2", "2");
  check_wrong(onebit_optimizer_set_gradient(optimizer, 0, (char *)gradient + 2), "gradient",
              "align");
  CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, 1, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_begin(optimizer, 0.1f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, 0, gradient), ONEBIT_ERROR_BUSY);
  CHECK_WORDS("open");
  CHECK_STATUS(onebit_optimizer_step(optimizer, 0.1f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, 0, gradient), ONEBIT_OK);
  check_wrong(onebit_optimizer_get_loss_scale(NULL, &scale), "optimizer", "NULL");
  check_wrong(onebit_optimizer_get_loss_scale(optimizer, NULL), "scale", "NULL");
  CHECK_STATUS(onebit_optimizer_get_loss_scale(optimizer, &scale), ONEBIT_OK);
  CHECK(scale == 1, "a loss scale of %g without loss scaling", scale);
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}

Test(arguments_adam, create) {
  onebit_comm_t comm = self();
  onebit_tensor_t tensor = {parameter, gradient, COUNT, 0, 0, 0};
  onebit_optimizer_t optimizer = (onebit_optimizer_t)(void *)parameter;
  check_wrong(onebit_adam_create(NULL, &tensor, 1, NULL, &optimizer), "comm", "NULL");
  CHECK(optimizer == NULL, "a failed creation left an optimizer");
  optimizer = (onebit_optimizer_t)(void *)parameter;
  check_wrong(onebit_adam_create(comm, NULL, 1, NULL, &optimizer), "tensors", "NULL");
  CHECK(optimizer == NULL, "a failed creation left an optimizer");
  check_wrong(onebit_adam_create(comm, &tensor, 1, NULL, NULL), "optimizer", "NULL");
  onebit_optimizer_destroy(NULL);
  onebit_comm_destroy(comm);
}

/* Neither parameters nor the count of steps change. */
static void check_steps(onebit_optimizer_t optimizer) {
  static const struct {
    float rate;
    const char *value;
  } wrong[] = {{NAN, "nan"}, {INFINITY, "inf"}, {-0.5f, "-0.5"}};
  onebit_optimizer_info_t info = {.size = sizeof info};
  float before[COUNT];
  memcpy(before, parameter, sizeof before);
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  uint64_t steps = info.steps;
  for (size_t k = 0; k < 3; k++) {
    check_wrong(onebit_optimizer_step(optimizer, wrong[k].rate), "learning_rate", wrong[k].value);
    CHECK_BITS("parameters", parameter, before, COUNT, ONEBIT_FLOAT32);
  }
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  CHECK(info.steps == steps, "%llu steps", (unsigned long long)info.steps);
  CHECK_STATUS(onebit_optimizer_step(optimizer, 0.0f), ONEBIT_OK);
}

Test(arguments_adam, step_and_info) {
  onebit_comm_t comm = self();
  onebit_tensor_t tensor = {parameter, gradient, COUNT, 0, 0, 0};
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_optimizer_t optimizer = NULL;
  onebit_optimizer_info_t info = {.size = sizeof info};
  options.freeze_step = 1;
  fill_input(parameter, ONEBIT_FLOAT32, COUNT, 1, 0);
  fill_input(gradient, ONEBIT_FLOAT32, COUNT, 0, 0);
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  check_wrong(onebit_optimizer_step(NULL, 0.1f), "optimizer", "NULL");
  check_wrong(onebit_optimizer_begin(NULL, 0.1f), "optimizer", "NULL");
  check_wrong(onebit_optimizer_ready(NULL, 0), "optimizer", "NULL");
  check_wrong(onebit_optimizer_ready(optimizer, 0), "tensor 0", "no step is open");
  check_wrong(onebit_optimizer_begin(optimizer, NAN), "learning_rate", "nan");
  check_wrong(onebit_optimizer_begin(optimizer, -1.0f), "learning_rate", "-1");
  check_wrong(onebit_optimizer_ready(optimizer, 0), "tensor 0", "no step is open");
  check_wrong(onebit_optimizer_get_info(NULL, &info), "optimizer", "NULL");
  check_wrong(onebit_optimizer_get_info(optimizer, NULL), "info", "NULL");
  info.size = 7;
  check_wrong(onebit_optimizer_get_info(optimizer, &info), "size", "7");
  check_steps(optimizer); /* warm-up */
  check_steps(optimizer); /* compressed */
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}
