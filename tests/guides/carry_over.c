/*
 * carry_over save DIRECTORY COUNT: makes three steps of warm-up and saves. carry_over again FROM TO
 * COUNT: loads FROM and saves to TO. tests/scripts/check-guides runs it and writes the checkpoint
 * to load with examples/deepspeed_part.py.
 */
#include <onebit/onebit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST = 21 }; /* elements of the first tensor, which needs padding; COUNT in the second */

static float *make_array(size_t count, size_t period) {
  float *values = malloc(count * sizeof *values);
  for (size_t i = 0; values && i < count; i++)
    values[i] = ((float)(i * 7 % period) - (float)(period / 2)) / 16;
  return values;
}

static onebit_status_t run_steps(int save, char **names, size_t count) {
  onebit_comm_t comm = NULL;
  onebit_optimizer_t optimizer = NULL;
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_tensor_t tensors[2] = {{.parameter = make_array(FIRST, 11), .count = FIRST},
                                {.parameter = make_array(count, 13), .count = count}};
  float *gradients[2] = {make_array(FIRST, 17), make_array(count, 19)};
  tensors[0].gradient = gradients[0], tensors[1].gradient = gradients[1];
  options.freeze_step = 100;
  options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  onebit_status_t status = onebit_comm_create_self(&comm);
  if (status == ONEBIT_OK)
    status = onebit_adam_create(comm, tensors, 2, &options, &optimizer);
  for (int step = 0; save && step < 3 && status == ONEBIT_OK; step++)
    status = onebit_optimizer_step(optimizer, 0.01F);
  if (!save && status == ONEBIT_OK)
    status = onebit_optimizer_load_files(optimizer, names[0]);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_save_files(optimizer, names[!save]);
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
  for (int t = 0; t < 2; t++)
    free(tensors[t].parameter), free(gradients[t]);
  return status;
}

int main(int argc, char **argv) {
  if (argc < 4)
    return 2;
  if (run_steps(strcmp(argv[1], "save") == 0, argv + 2, (size_t)atol(argv[argc - 1])) == ONEBIT_OK)
    return 0;
  fprintf(stderr, "%s\n", onebit_last_error());
  return 1;
}
