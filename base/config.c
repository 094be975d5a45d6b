/* The file that ONEBIT_CONFIG names. */
#define _POSIX_C_SOURCE 200809L
#include "base/config.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"

/* A configuration of DeepSpeed's has some 2 KiB, and a hundred values. */
enum { MAX_BYTES = 1 << 16, MAX_VALUES = 1024, PREFIX = sizeof "ONEBIT_" - 1 };

/* The file's contents. Static: it is read before memory may fail, and kept as long as the
 * process. */
static struct {
  onebit_status_t status;
  char path[1024], error[512], text[MAX_BYTES + 1];
  struct ob_json_value values[MAX_VALUES];
  size_t count;
} config;

/* --- Keys */

#define LOCAL "gradients are each rank's own, and are weighed once"
#define OWN   "the program sets it"
static const struct {
  bool of_optimizer;
  const char *key, *why;
} without_effect[] = {
    {true, "lr", "the program gives each step its rate"},
    {true, "weight_decay", "the program gives each tensor its own"},
    {true, "cuda_aware", "the communicator has the transport"},
    {true, "comm_backend_name", "the communicator has the transport"},
    {true, "bias_correction", "as in DeepSpeed, which ignores it"},
    {true, "max_grad_norm", "gradient_clipping is the key that clips"},
    {true, "amsgrad", "no 1-bit optimizer has that variant"},
    {true, "eps_inside_sqrt", "as in DeepSpeed, which ignores it"},
    {true, "exp_avg_mask", "a block of zeros stays zero without it"},
    {false, "scheduler", "the program gives each step its rate"},
    {false, "fp16", "the program chooses types and loss scale"},
    {false, "bf16", "the program chooses the types"},
    {false, "bfloat16", "the program chooses the types"},
    {false, "gradient_accumulation_steps", "the program sets gradient_factor"},
    {false, "communication_data_type", "compressed steps send bits, others float32"},
    {false, "prescale_gradients", LOCAL},
    {false, "gradient_predivide_factor", LOCAL},
    {false, "zero_optimization", "1-bit optimizers are for stage 0"},
};

/* DeepSpeed's other keys, each between spaces. */
static const char others[] =
    " activation_checkpointing aio amp autotuning checkpoint comet comms_logger compile "
    "compression_training csv_monitor curriculum_learning data_efficiency data_types "
    "dataloader_drop_last disable_allgather dump_state eigenvalue elasticity flops_profiler "
    "fp32_allreduce graph_harvesting hybrid_engine load_universal_checkpoint memory_breakdown "
    "nebula pipeline progressive_layer_drop quantize_training "
    "seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print "
    "tensor_parallel tensorboard timers train_batch_size train_micro_batch_size_per_gpu "
    "use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb "
    "weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer ";

const char *ob_config_without_effect(const char *key, bool of_optimizer) {
  char spaced[64];
  for (size_t i = 0; i < sizeof without_effect / sizeof without_effect[0]; i++)
    if (without_effect[i].of_optimizer == of_optimizer && strcmp(without_effect[i].key, key) == 0)
      return without_effect[i].why;
  int length = snprintf(spaced, sizeof spaced, " %s ", key);
  bool known = !of_optimizer && length < (int)sizeof spaced && strstr(others, spaced);
  return known && !strchr(key, ' ') ? "" : NULL;
}

/* --- Values */

static const struct ob_json_value *next_value_in(int object, size_t from) {
  for (; from < config.count; from++)
    if (config.values[from].parent == object)
      return &config.values[from];
  return NULL;
}

static size_t config_index_of(const struct ob_json_value *value) {
  return value ? (size_t)(value - config.values) : 0;
}

const struct ob_json_value *ob_config_next(const struct ob_json_value *object,
                                           const struct ob_json_value *value) {
  return next_value_in((int)config_index_of(object), config_index_of(value ? value : object) + 1);
}

const struct ob_json_value *ob_config_find(const struct ob_json_value *object, const char *key) {
  const struct ob_json_value *value = NULL;
  if (ob_config_check() != ONEBIT_OK)
    return NULL;
  while ((value = ob_config_next(object, value)))
    if (strcmp(value->key, key) == 0)
      return value;
  return NULL;
}

static const char *config_origin_of(const struct ob_json_value *value, const char *key) {
  static _Thread_local char text[256];
  snprintf(text, sizeof text, "%.160s:%d%s%.60s", config.path, value->line, key ? ": " : "",
           key ? key : "");
  return text;
}

const char *ob_config_origin(const struct ob_json_value *value) {
  return config_origin_of(value, value->key);
}

const char *ob_config_line(const struct ob_json_value *value) {
  return config_origin_of(value, NULL);
}

onebit_status_t ob_config_wrong(const struct ob_json_value *value, const char *why) {
  return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %.80s, %s", ob_config_origin(value),
                  value->text ? value->text : ob_json_kind_name(value->kind), why);
}

static bool names_knob(const char *key, enum ob_knob knob) {
  return knob != OB_KNOB_CONFIG && strcasecmp(ob_knobs[knob].name + PREFIX, key) == 0 &&
         strpbrk(key, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") == NULL;
}

static const char *text_of(const struct ob_json_value *value) {
  return value->kind == OB_JSON_TRUE ? "1" : value->kind == OB_JSON_FALSE ? "0" : value->text;
}

const char *ob_config_knob(enum ob_knob knob, const struct ob_json_value **found) {
  const struct ob_json_value *value = NULL;
  if (ob_config_check() != ONEBIT_OK)
    return NULL;
  while ((value = ob_config_next(NULL, value)))
    if (names_knob(value->key, knob) && text_of(value)) {
      *found = value;
      return text_of(value);
    }
  return NULL;
}

/* --- Reading */

static onebit_status_t check_key(const struct ob_json_value *value) {
  for (enum ob_knob knob = 0; knob < OB_KNOB_COUNT; knob++)
    if (names_knob(value->key, knob))
      return value->kind < OB_JSON_ARRAY
                 ? ONEBIT_OK
                 : ob_config_wrong(value, "not a text, a number, true or false");
  if (strcmp(value->key, "optimizer") == 0)
    return value->kind == OB_JSON_OBJECT || value->kind == OB_JSON_NULL
               ? ONEBIT_OK
               : ob_config_wrong(value, "not an object");
  if (strcmp(value->key, "gradient_clipping") == 0 || ob_config_without_effect(value->key, false))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "%s: unknown key; it is neither a variable of the environment in lower case "
                  "without ONEBIT_, as \"threads\", nor one of DeepSpeed's",
                  ob_config_origin(value));
}

static onebit_status_t config_load(void) {
  char why[OB_INPUT_REASON];
  struct ob_input input;
  int code = ob_input_open(&input, AT_FDCWD, config.path);
  if (code == 0 && input.bytes <= MAX_BYTES)
    code = ob_input_read(&input, 0, config.text, (size_t)input.bytes);
  ob_input_close(&input);
  if (code != 0)
    return ob_error(ONEBIT_ERROR_FILE, "ONEBIT_CONFIG=%.200s: %s", config.path,
                    ob_input_reason(code, why));
  if (input.bytes > MAX_BYTES || memchr(config.text, 0, (size_t)input.bytes))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "ONEBIT_CONFIG=%.200s: %s", config.path,
                    input.bytes > MAX_BYTES ? "larger than 64 KiB" : "not a text");
  OB_TRY(ob_json_read(config.path, config.text, config.values, MAX_VALUES, &config.count));
  for (const struct ob_json_value *value = NULL; (value = ob_config_next(NULL, value));)
    OB_TRY(check_key(value));
  return ONEBIT_OK;
}

static void read_once(void) {
  const char *path = ob_knob_text(OB_KNOB_CONFIG);
  if (!path)
    return;
  bool fits = snprintf(config.path, sizeof config.path, "%s", path) < (int)sizeof config.path;
  config.status =
      fits ? config_load() : ob_error(ONEBIT_ERROR_FILE, "ONEBIT_CONFIG: its path is too long");
  if (config.status == ONEBIT_OK)
    return;
  config.count = 0;
  snprintf(config.error, sizeof config.error, "%s", onebit_last_error());
}

onebit_status_t ob_config_check(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_once);
  return config.status == ONEBIT_OK ? ONEBIT_OK : ob_error(config.status, "%s", config.error);
}

void ob_config_warn(int rank) {
  static atomic_flag warned = ATOMIC_FLAG_INIT;
  if (ob_config_check() != ONEBIT_OK || atomic_flag_test_and_set(&warned))
    return;
  for (const struct ob_json_value *value = NULL; (value = ob_config_next(NULL, value));) {
    const char *why = ob_config_without_effect(value->key, false);
    if (why)
      ob_log(OB_LOG_WARN, rank, "%s is without effect%s%s", ob_config_origin(value),
             *why ? ": " : "", why);
  }
}
