/* Makes wrong calls on optimizers and outer steps: creation, steps, functions that return
 * information, checkpoints. */
#include <math.h>
#include <string.h>

#include "tests/support_wrong_calls.h"

#define ARGUMENT ONEBIT_ERROR_ARGUMENT
#define BUSY     ONEBIT_ERROR_BUSY

/* ---- Creation ---- */

static void wrong_tensors(const struct wrong_scene *scene) {
  onebit_optimizer_t made;
  float *p = scene->receive, *g = scene->send;
#define TENSORS(count, message, ...)                                                               \
  WRONG(onebit_efficient_adam_create,                                                              \
        (scene->comm, (const onebit_tensor_t[]){__VA_ARGS__}, count, NULL, &made), ARGUMENT,       \
        message);                                                                                  \
  WRONG_VALUE(onebit_efficient_adam_create, (message), made == NULL, "")
  TENSORS(1, "tensors[0].parameter is NULL", {NULL, g, 8, 0, 0, 0});
  TENSORS(1, "tensors[0].parameter is 0x", {(char *)p + 1, g, 8, 0, 0, 0});
  TENSORS(1, "tensors[0].gradient is 0x", {p, (char *)g + 2, 8, 0, 0, 0});
  TENSORS(1, "too large to address", {p, g, SIZE_MAX / 2, 0, 0, 0});
  TENSORS(1, "overlap", {p, p, 8, 0, 0, 0});
#define SECOND(message, ...) TENSORS(2, message, {p, g, 8, 0, 0, 0}, {__VA_ARGS__})
  SECOND("tensors[1].parameter is NULL", NULL, g + 8, 8, 0, 0, 0);
  SECOND("not aligned to", (char *)(p + 8) + 2, g + 8, 8, 0, 0, 0);
  SECOND("not aligned to", p + 8, (char *)(g + 8) + 1, 8, 0, 0, 0);
  SECOND("tensors[0] and tensors[1] overlap", p + 7, g + 8, 8, 0, 0, 0);
  SECOND("tensors[0] and tensors[1] overlap", p + 8, g + 7, 8, 0, 0, 0);
  SECOND("tensors[1] and tensors[1] overlap", p + 8, p + 9, 8, 0, 0, 0);
  SECOND("tensors[0] and tensors[1] overlap", p + 8, p, 8, 0, 0, 0);
  SECOND("tensors[1].weight_decay is nan", p + 8, g + 8, 8, NAN, 0, 0);
  SECOND("tensors[1].weight_decay is -1", p + 8, g + 8, 8, -1, 0, 0);
  SECOND("tensors[1].weight_decay is inf", p + 8, g + 8, 8, INFINITY, 0, 0);
  SECOND("tensors[1].learning_rate_factor is inf", p + 8, g + 8, 8, 0, INFINITY, 0);
  SECOND("tensors[1].learning_rate_factor is -2", p + 8, g + 8, 8, 0, -2, 0);
  SECOND("tensors[1].learning_rate_factor is nan", p + 8, g + 8, 8, 0, NAN, 0);
  SECOND("tensors[1].count is 18446744073709551615", p, g, SIZE_MAX, 0, 0, 0);
}

/* Makes wrong calls of creation functions. Wrong options are in the tables of
 * test_arguments_optimizers.c. */
void wrong_creations(const struct wrong_scene *scene) {
  onebit_optimizer_t made;
  void *plan = scene->plan;
#define CREATIONS(create, options)                                                                 \
  WRONG(create, (NULL, &scene->tensor, 1, NULL, &made), ARGUMENT, "comm is NULL");                 \
  WRONG(create, (scene->no_comm, &scene->tensor, 1, NULL, &made), ARGUMENT,                        \
        "not a communicator that exists");                                                         \
  WRONG(create, (plan, &scene->tensor, 1, NULL, &made), ARGUMENT, "which is a plan");              \
  WRONG(create, (scene->comm, &scene->tensor, 1, NULL, NULL), ARGUMENT, "optimizer is NULL");      \
  WRONG(create, (scene->comm, NULL, 1, NULL, &made), ARGUMENT, "tensors is NULL");                 \
  WRONG(create, (scene->comm, &scene->tensor, 1, &(options){.size = 0}, &made), ARGUMENT,          \
        "options->size is 0");                                                                     \
  WRONG(create, (scene->comm, &scene->tensor, 1, &(options){.size = 12}, &made), ARGUMENT,         \
        "options->size is 12");                                                                    \
  WRONG_VALUE(create, (size), made == NULL, "")
  CREATIONS(onebit_adam_create, onebit_adam_options_t);
  CREATIONS(onebit_efficient_adam_create, onebit_efficient_adam_options_t);
  CREATIONS(onebit_lamb_create, onebit_lamb_options_t);
  CREATIONS(onebit_lion_create, onebit_lion_options_t);
  CREATIONS(onebit_momentum_create, onebit_momentum_options_t);
  CREATIONS(onebit_zero_one_adam_create, onebit_zero_one_adam_options_t);
  wrong_tensors(scene);
}

/* ---- Steps ---- */

/* Makes wrong calls of step functions. An error of a call on `open`, whose step has begun, makes
 * that step fail. */
void wrong_steps(const struct wrong_scene *scene) {
  onebit_optimizer_t optimizer = scene->optimizer, gone = scene->no_optimizer, open = scene->open;
  void *plan = scene->plan, *foreign = scene->foreign;
  onebit_comm_t comm;
  WRONG(onebit_optimizer_shrink, (optimizer, NULL), ARGUMENT, "survivors is NULL");
#define STEPS(handle, part)                                                                        \
  WRONG(onebit_optimizer_step, (handle, 0.1F), ARGUMENT, part);                                    \
  WRONG(onebit_optimizer_begin, (handle, 0.1F), ARGUMENT, part);                                   \
  WRONG(onebit_optimizer_move, (handle, scene->comm), ARGUMENT, part);                             \
  WRONG(onebit_optimizer_shrink, (handle, &comm), ARGUMENT, part);                                 \
  WRONG(onebit_optimizer_compare, (handle), ARGUMENT, part);                                       \
  WRONG(onebit_optimizer_set_compare_interval, (handle, 1), ARGUMENT, part);                       \
  WRONG(onebit_optimizer_ready, (handle, 0), ARGUMENT, part);                                      \
  WRONG(onebit_optimizer_set_learning_rate_factor, (handle, 0, 1), ARGUMENT, part);                \
  WRONG(onebit_optimizer_set_weight_decay, (handle, 0, 0), ARGUMENT, part);                        \
  WRONG(onebit_optimizer_set_beta1, (handle, 0.5), ARGUMENT, part);                                \
  WRONG(onebit_optimizer_set_tag, (handle, 1), ARGUMENT, part);                                    \
  WRONG(onebit_optimizer_take_parameters, (handle), ARGUMENT, part);                               \
  WRONG(onebit_optimizer_set_gradient, (handle, 0, NULL), ARGUMENT, part)
  STEPS(NULL, "optimizer is NULL");
  STEPS(gone, "not an optimizer that exists (it is destroyed, or was never created)");
  STEPS(plan, "which is a plan");
  STEPS(foreign, "not an optimizer that exists");
#define RATES(call)                                                                                \
  WRONG(call, (optimizer, NAN), ARGUMENT, "learning_rate is nan");                                 \
  WRONG(call, (optimizer, -1), ARGUMENT, "learning_rate is -1");                                   \
  WRONG(call, (optimizer, INFINITY), ARGUMENT, "learning_rate is inf")
  RATES(onebit_optimizer_step);
  RATES(onebit_optimizer_begin);
  WRONG(onebit_optimizer_ready, (optimizer, 0), ARGUMENT, "no step is open");
  WRONG(onebit_optimizer_set_gradient, (optimizer, 1, NULL), ARGUMENT, "tensor is 1");
  WRONG(onebit_optimizer_set_gradient, (optimizer, 0, (char *)foreign + 1), ARGUMENT,
        "not aligned to float");
#define CONSTANTS(call, name)                                                                      \
  WRONG(call, (optimizer, 1, 1), ARGUMENT, "tensor is 1");                                         \
  WRONG(call, (optimizer, 0, NAN), ARGUMENT, name " is nan");                                      \
  WRONG(call, (optimizer, 0, -1), ARGUMENT, name " is -1");                                        \
  WRONG(call, (optimizer, 0, INFINITY), ARGUMENT, name " is inf");                                 \
  WRONG(call, (open, 0, 1), BUSY, "a step is open")
  CONSTANTS(onebit_optimizer_set_learning_rate_factor, "factor");
  CONSTANTS(onebit_optimizer_set_weight_decay, "weight_decay");
  WRONG(onebit_optimizer_set_beta1, (optimizer, 0), ARGUMENT, "beta1 is 0");
  WRONG(onebit_optimizer_set_beta1, (optimizer, 1), ARGUMENT, "beta1 is 1");
  WRONG(onebit_optimizer_set_beta1, (optimizer, NAN), ARGUMENT, "beta1 is nan");
  WRONG(onebit_optimizer_set_beta1, (open, 0.5), BUSY, "a step is open");
  WRONG(onebit_optimizer_set_tag, (open, 1), BUSY, "a step is open");
  WRONG(onebit_optimizer_take_parameters, (open), BUSY, "a step is open");
  WRONG(onebit_optimizer_begin, (open, 0.1F), ARGUMENT, "a step is open");
  WRONG(onebit_optimizer_set_gradient, (open, 0, NULL), BUSY, "a step is open");
  WRONG(onebit_optimizer_ready, (open, 1), ARGUMENT, "tensor is 1");
  WRONG(onebit_optimizer_ready, (open, (size_t)-1), ARGUMENT, "tensor is 18446744073709551615");
  onebit_optimizer_ready(open, 0);
  WRONG(onebit_optimizer_ready, (open, 0), ARGUMENT, "tensor 0 is ready a second time");
  WRONG(onebit_optimizer_step, (open, 0.2F), ARGUMENT, "a step is open, with learning_rate 0.1");
  onebit_optimizer_begin(open, 0.1F);
  WRONG(onebit_optimizer_step, (open, 0.2F), ARGUMENT, "learning_rate is 0.2");
  onebit_optimizer_begin(open, 0.1F);
#define DESTROY(handle) (onebit_optimizer_destroy(handle), true)
  WRONG_VALUE(onebit_optimizer_destroy, (gone), DESTROY(gone), "not an optimizer that exists");
  WRONG_VALUE(onebit_optimizer_destroy, (plan), DESTROY(plan), "which is a plan");
  WRONG_VALUE(onebit_optimizer_destroy, (foreign), DESTROY(foreign),
              "not an optimizer that exists");
}

/* ---- Functions that return information about optimizers */

void wrong_queries(const struct wrong_scene *scene) {
  onebit_optimizer_t optimizer = scene->optimizer, open = scene->open;
  onebit_optimizer_info_t info = {.size = sizeof info};
  onebit_optimizer_statistics_t all = {.size = sizeof all};
  onebit_tensor_statistics_t one = {.size = sizeof one};
  char line[8];
  double scale;
  onebit_stage_t stage;
  uint64_t steps;
  void *comm = scene->comm;
#define LOOKS(handle, part)                                                                        \
  WRONG(onebit_optimizer_get_info, (handle, &info), ARGUMENT, part);                               \
  WRONG(onebit_optimizer_get_loss_scale, (handle, &scale), ARGUMENT, part);                        \
  WRONG(onebit_optimizer_get_stage, (handle, &stage, &steps), ARGUMENT, part);                     \
  WRONG(onebit_optimizer_get_statistics, (handle, &all), ARGUMENT, part);                          \
  WRONG(onebit_optimizer_get_tensor_statistics, (handle, 0, &one), ARGUMENT, part);                \
  WRONG(onebit_optimizer_describe, (handle, ONEBIT_FORMAT_TEXT, line, 8, NULL), ARGUMENT, part);   \
  WRONG(onebit_optimizer_check, (handle, NULL), ARGUMENT, part)
  LOOKS(NULL, "optimizer is NULL");
  LOOKS(scene->no_optimizer,
        "not an optimizer that exists (it is destroyed, or was never created)");
  LOOKS(comm, "which is a communicator");
  WRONG(onebit_optimizer_get_info, (optimizer, NULL), ARGUMENT, "info is NULL");
  WRONG(onebit_optimizer_get_info, (optimizer, &(onebit_optimizer_info_t){.size = 3}), ARGUMENT,
        "info->size is 3");
  WRONG(onebit_optimizer_get_loss_scale, (optimizer, NULL), ARGUMENT, "scale is NULL");
  WRONG(onebit_optimizer_get_stage, (optimizer, NULL, &steps), ARGUMENT, "stage is NULL");
  WRONG(onebit_optimizer_get_stage, (optimizer, &stage, NULL), ARGUMENT, "steps is NULL");
  WRONG(onebit_optimizer_get_statistics, (optimizer, NULL), ARGUMENT, "statistics is NULL");
  WRONG(onebit_optimizer_get_statistics, (optimizer, &(onebit_optimizer_statistics_t){.size = 5}),
        ARGUMENT, "statistics->size is 5");
  WRONG(onebit_optimizer_get_tensor_statistics, (optimizer, 7, &one), ARGUMENT, "tensor is 7");
  WRONG(onebit_optimizer_get_tensor_statistics, (optimizer, 0, NULL), ARGUMENT,
        "statistics is NULL");
  WRONG(onebit_optimizer_describe, (optimizer, (onebit_format_t)4, line, 8, NULL), ARGUMENT,
        "format is 4");
  WRONG(onebit_optimizer_describe, (optimizer, ONEBIT_FORMAT_JSON, NULL, 8, NULL), ARGUMENT,
        "buffer is NULL");
  WRONG(onebit_optimizer_get_statistics, (open, &all), BUSY, "a step is open");
  WRONG(onebit_optimizer_get_tensor_statistics, (open, 0, &one), BUSY, "a step is open");
  WRONG(onebit_optimizer_describe, (open, ONEBIT_FORMAT_TEXT, line, 8, NULL), BUSY, "open");
  WRONG(onebit_optimizer_check, (open, NULL), BUSY, "a step is open");
}

/* ---- Checkpoints ---- */

static void wrong_directories(const struct wrong_scene *scene) {
  char longest[6000];
  memset(longest, 'x', sizeof longest - 1);
  longest[sizeof longest - 1] = 0;
  longest[0] = '/';
#define DIRECTORIES(call)                                                                          \
  WRONG(call, (NULL, "/tmp"), ARGUMENT, "optimizer is NULL");                                      \
  WRONG(call, (scene->no_optimizer, "/tmp"), ARGUMENT, "not an optimizer that exists");            \
  WRONG(call, (scene->optimizer, NULL), ARGUMENT, "directory is NULL");                            \
  WRONG(call, (scene->optimizer, ""), ARGUMENT, "directory is");                                   \
  WRONG(call, (scene->optimizer, longest), ARGUMENT, "directory is a path of 5999 bytes");         \
  WRONG(call, (scene->optimizer, "/dev/null/none"), ONEBIT_ERROR_FILE, "/dev/null/none");          \
  WRONG(call, (scene->open, "/tmp"), BUSY, "a step is open")
  DIRECTORIES(onebit_optimizer_save_files);
  DIRECTORIES(onebit_optimizer_load_files);
}

void wrong_checkpoints(const struct wrong_scene *scene) {
  onebit_optimizer_t optimizer = scene->optimizer;
  char memory[256] = "this is no part of a checkpoint";
  const void *parts[] = {memory}, *none[] = {NULL};
  size_t sizes[] = {sizeof memory}, bytes;
  void *plan = scene->plan;
#define SAVES(handle, status, part)                                                                \
  WRONG(onebit_optimizer_save, (handle, memory, sizeof memory, &bytes), status, part);             \
  WRONG(onebit_optimizer_save_whole, (handle, memory, sizeof memory, &bytes), status, part);       \
  WRONG(onebit_optimizer_load, (handle, parts, sizes, 1), status, part)
  SAVES(NULL, ARGUMENT, "optimizer is NULL");
  SAVES(scene->no_optimizer, ARGUMENT, "not an optimizer that exists");
  SAVES(plan, ARGUMENT, "which is a plan");
  SAVES(scene->open, BUSY, "a step is open");
  WRONG(onebit_optimizer_save, (optimizer, memory, 1, NULL), ARGUMENT, "bytes is NULL");
  WRONG(onebit_optimizer_save, (optimizer, memory, 1, &bytes), ARGUMENT, "capacity is 1");
  WRONG(onebit_optimizer_save_whole, (optimizer, memory, 1, NULL), ARGUMENT, "bytes is NULL");
  WRONG(onebit_optimizer_save_whole, (optimizer, memory, 1, &bytes), ARGUMENT, "capacity is 1");
  WRONG(onebit_optimizer_load, (optimizer, NULL, sizes, 1), ARGUMENT, "parts is NULL");
  WRONG(onebit_optimizer_load, (optimizer, parts, NULL, 1), ARGUMENT, "bytes is NULL");
  WRONG(onebit_optimizer_load, (optimizer, none, sizes, 1), ARGUMENT, "parts[0] is NULL");
  WRONG(onebit_optimizer_load, (optimizer, parts, sizes, 0), ARGUMENT, "count is 0");
  WRONG(onebit_optimizer_load, (optimizer, parts, sizes, -5), ARGUMENT, "count is -5");
  memory[0] = 't';
  WRONG(onebit_optimizer_load, (optimizer, parts, sizes, 1), ONEBIT_ERROR_CHECKPOINT, "part");
  wrong_directories(scene);
}

/* ---- Outer steps ---- */

static void wrong_options(const struct wrong_scene *scene) {
  onebit_outer_t made;
#define OPTIONS(status, message, ...)                                                              \
  WRONG(onebit_outer_create,                                                                       \
        (scene->comm, &scene->tensor, 1,                                                           \
         &(onebit_outer_options_t){.size = sizeof(onebit_outer_options_t), __VA_ARGS__}, &made),   \
        status, message)
  OPTIONS(ARGUMENT, "rule is 3", .rule = (onebit_outer_rule_t)3);
  OPTIONS(ARGUMENT, "learning_rate is -1", .learning_rate = -1);
  OPTIONS(ARGUMENT, "momentum is 0.5, but rule is ONEBIT_OUTER_MEAN", .momentum = 0.5);
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
  OPTIONS(ONEBIT_ERROR_UNSUPPORTED, "bits is ONEBIT_OUTER_SPARSE, but device",
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
  CREATE(scene->no_comm, &scene->tensor, &made, "not a communicator that exists");
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
  SITES(site, scene->no_comm, &made, ARGUMENT, "not a communicator that exists", 0);
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
  REFUSED("ONEBIT_OUTER_SPARSE is not supported with sites", .bits = ONEBIT_OUTER_SPARSE);
  REFUSED("ONEBIT_BLOCK_BUFFER is not supported with", .block_size = ONEBIT_BLOCK_BUFFER);
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
  WRONG(onebit_outer_check, (outer), ARGUMENT, "not an outer step that exists");
}
