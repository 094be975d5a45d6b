/* Wrong calls on outer steps. */
#include <math.h>

#include "tests/support_wrong_calls.h"

#define ARGUMENT ONEBIT_ERROR_ARGUMENT

static void wrong_options(const struct wrong_scene *scene) {
  onebit_outer_t made;
#define OPTIONS(status, message, ...)                                                              \
  WRONG(onebit_outer_create,                                                                       \
        (scene->comm, &scene->tensor, 1,                                                           \
         &(onebit_outer_options_t){.size = sizeof(onebit_outer_options_t), __VA_ARGS__}, &made),   \
        status, message)
  OPTIONS(ARGUMENT, "rule is 3", .rule = (onebit_outer_rule_t)3);
  OPTIONS(ARGUMENT, "learning_rate is -1", .learning_rate = -1);
  OPTIONS(ARGUMENT, "momentum is 0.5, and rule is ONEBIT_OUTER_MEAN", .momentum = 0.5);
  OPTIONS(ARGUMENT, "momentum is 1", .rule = ONEBIT_OUTER_NESTEROV, .momentum = 1);
  OPTIONS(ARGUMENT, "bits is 3", .bits = 3);
  OPTIONS(ARGUMENT, "fragments is 31", .fragments = 31);
  OPTIONS(ARGUMENT, "delay is 30", .delay = 30);
  OPTIONS(ARGUMENT, "mixing is 1.5", .mixing = 1.5);
  OPTIONS(ARGUMENT, "mixing is nan", .mixing = NAN);
  OPTIONS(ARGUMENT, "parameter_dtype is 7", .parameter_dtype = (onebit_dtype_t)7);
  OPTIONS(ARGUMENT, "block_size is 33", .block_size = 33);
  OPTIONS(ARGUMENT, "threads is -2", .threads = -2);
  OPTIONS(ARGUMENT, "device is 7", .device = (onebit_device_t)7);
  OPTIONS(ONEBIT_ERROR_UNSUPPORTED, "bits is ONEBIT_OUTER_SPARSE, and device",
          .bits = ONEBIT_OUTER_SPARSE, .device = ONEBIT_DEVICE_CUDA);
}

static void wrong_creations_of_outer(const struct wrong_scene *scene) {
  onebit_outer_t made;
  float nan = NAN;
  const onebit_tensor_t none = {.count = 1},
                        odd = {.parameter = (char *)scene->send + 1, .count = 1},
                        not_finite = {.parameter = &nan, .count = 1},
                        large = {.parameter = scene->send, .count = SIZE_MAX / 2};
#define CREATE(comm, tensors, result, message)                                                     \
  WRONG(onebit_outer_create, (comm, tensors, 1, NULL, result), ARGUMENT, message)
  CREATE(NULL, &scene->tensor, &made, "comm is NULL");
  CREATE(scene->no_comm, &scene->tensor, &made, "which is no communicator");
  CREATE(scene->comm, &scene->tensor, NULL, "outer is NULL");
  CREATE(scene->comm, NULL, &made, "tensors is NULL");
  CREATE(scene->comm, &none, &made, "tensors[0].parameter is NULL");
  CREATE(scene->comm, &odd, &made, "not aligned");
  CREATE(scene->comm, &not_finite, &made, "tensors[0].parameter[0] is nan");
  CREATE(scene->comm, &large, &made, "too large to address");
  WRONG(onebit_outer_create,
        (scene->comm, &scene->tensor, 1, &(onebit_outer_options_t){.size = 12}, &made), ARGUMENT,
        "options->size is 12");
}

static void wrong_outer_checkpoints(onebit_outer_t outer) {
  size_t bytes;
  unsigned char memory[8] = {0};
  const void *parts[] = {memory};
  const size_t some[] = {sizeof memory};
  WRONG(onebit_outer_save, (NULL, NULL, 0, &bytes), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_save, (outer, NULL, 0, NULL), ARGUMENT, "bytes is NULL");
  WRONG(onebit_outer_save, (outer, memory, sizeof memory, &bytes), ARGUMENT, "capacity is 8");
  WRONG(onebit_outer_load, (NULL, parts, some, 1), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_load, (outer, NULL, some, 1), ARGUMENT, "parts is NULL");
  WRONG(onebit_outer_load, (outer, parts, NULL, 1), ARGUMENT, "bytes is NULL");
  WRONG(onebit_outer_load, (outer, parts, some, 0), ARGUMENT, "count is 0");
  WRONG(onebit_outer_load, (outer, parts, some, 1), ONEBIT_ERROR_CHECKPOINT, "truncated");
  WRONG(onebit_outer_save_files, (NULL, "."), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_save_files, (outer, NULL), ARGUMENT, "directory is NULL");
  WRONG(onebit_outer_save_files, (outer, ""), ARGUMENT, "directory is empty");
  WRONG(onebit_outer_load_files, (NULL, "."), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_load_files, (outer, NULL), ARGUMENT, "directory is NULL");
  WRONG(onebit_outer_load_files, (outer, "/nowhere"), ONEBIT_ERROR_FILE, "/nowhere");
  WRONG(onebit_outer_move, (NULL, NULL), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_move, (outer, NULL), ARGUMENT, "comm is NULL");
  WRONG(onebit_outer_shrink, (NULL, NULL), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_shrink, (outer, NULL), ARGUMENT, "survivors is NULL");
}

static void wrong_sites(const struct wrong_scene *scene, onebit_outer_t plain) {
  onebit_comm_t site;
  onebit_outer_t made;
  onebit_sites_info_t info = {.size = sizeof info}, small = {.size = 3};
  onebit_comm_create_self(&site);
#define SITES(site, between, result, status, message, ...)                                         \
  WRONG(onebit_outer_create_sites,                                                                 \
        (site, between, &scene->tensor, 1, NULL,                                                   \
         &(onebit_sites_options_t){.size = sizeof(onebit_sites_options_t), __VA_ARGS__}, result),  \
        status, message)
  SITES(NULL, scene->comm, &made, ARGUMENT, "site is NULL", 0);
  SITES(site, scene->no_comm, &made, ARGUMENT, "which is no communicator", 0);
  SITES(site, scene->comm, NULL, ARGUMENT, "outer is NULL", 0);
  SITES(site, NULL, &made, ARGUMENT, "between is NULL on rank 0", 0);
  SITES(site, scene->comm, &made, ARGUMENT, "sites->patience is -1", .patience = -1);
  SITES(site, scene->comm, &made, ARGUMENT, "sites->patience is nan", .patience = NAN);
  SITES(site, scene->comm, &made, ARGUMENT, "sites->quorum is 100", .quorum = 100);
  WRONG(onebit_outer_create_sites,
        (site, scene->comm, &scene->tensor, 1, NULL, &(onebit_sites_options_t){.size = 3}, &made),
        ARGUMENT, "sites->size is 3");
#define REFUSED(name, ...)                                                                         \
  WRONG(onebit_outer_create_sites,                                                                 \
        (site, scene->comm, &scene->tensor, 1,                                                     \
         &(onebit_outer_options_t){.size = sizeof(onebit_outer_options_t), __VA_ARGS__}, NULL,     \
         &made),                                                                                   \
        ONEBIT_ERROR_UNSUPPORTED, name)
  REFUSED("ONEBIT_OUTER_SPARSE does not go with sites", .bits = ONEBIT_OUTER_SPARSE);
  REFUSED("ONEBIT_BLOCK_BUFFER does not go with", .block_size = ONEBIT_BLOCK_BUFFER);
  REFUSED("fragments is 100000000, more than", .fragments = 100000000, .local_steps = 100000000);
  WRONG(onebit_outer_get_sites, (NULL, &info), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_get_sites, (plain, NULL), ARGUMENT, "info is NULL");
  WRONG(onebit_outer_get_sites, (plain, &small), ARGUMENT, "info->size is 3");
  WRONG(onebit_outer_get_sites, (plain, &info), ARGUMENT, "not made by onebit_outer_create_sites");
  onebit_comm_destroy(site);
}

void wrong_outers(const struct wrong_scene *scene) {
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  onebit_outer_info_t info = {.size = 3};
  onebit_outer_t outer = NULL, plan = (void *)scene->plan;
  wrong_creations_of_outer(scene);
  wrong_options(scene);
  options.weighted = 1;
  onebit_outer_create(scene->comm, &scene->tensor, 1, &options, &outer);
  WRONG(onebit_outer_step, (NULL, 1), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_step, (plan, 1), ARGUMENT, "which is a plan");
  WRONG(onebit_outer_step, (outer, -1), ARGUMENT, "weight is -1");
  WRONG(onebit_outer_step, (outer, NAN), ARGUMENT, "weight is nan");
  WRONG(onebit_outer_synchronize, (NULL), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_get_consensus, (NULL, 0, scene->send), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_get_consensus, (outer, 1, scene->send), ARGUMENT, "tensor is 1");
  WRONG(onebit_outer_get_consensus, (outer, 0, NULL), ARGUMENT, "values is NULL");
  WRONG(onebit_outer_get_info, (NULL, &info), ARGUMENT, "outer is NULL");
  WRONG(onebit_outer_get_info, (outer, NULL), ARGUMENT, "info is NULL");
  WRONG(onebit_outer_get_info, (outer, &info), ARGUMENT, "info->size is 3");
  WRONG(onebit_outer_check, (NULL), ARGUMENT, "outer is NULL");
  wrong_outer_checkpoints(outer);
  WRONG_VALUE(onebit_outer_destroy, (plan), (onebit_outer_destroy(plan), true), "which is a plan");
  wrong_sites(scene, outer);
  onebit_outer_destroy(outer);
  WRONG(onebit_outer_check, (outer), ARGUMENT, "which is no outer step");
}
