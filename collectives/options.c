/* Options of a plan: checks of their values, defaults, and the choice of the schedule. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/knobs.h"
#include "collectives/plan.h"
#include "collectives/plan_private.h"
#include "collectives/schedules/schedule.h"
#include "compression/levels.h"

#define LARGEST_BLOCK 65536

/* The number of elements of a run. With one scale for the whole buffer the sum is computed in runs,
 * so that threads can share the work and sums in float32 stay precise. */
#define RUN 2048

#define MAX_THREADS 1024

static onebit_status_t check_enum(const char *name, int value, int last) {
  if (value < 0 || value > last)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %d, not 0 to %d", name, value, last);
  return ONEBIT_OK;
}

static onebit_status_t check_kinds(const onebit_plan_options_t *options) {
  OB_TRY(check_enum("operation", (int)options->operation, ONEBIT_REDUCE_SCATTER));
  OB_TRY(check_enum("dtype", (int)options->dtype, ONEBIT_FLOAT16));
  OB_TRY(check_enum("wire", (int)options->wire, ONEBIT_WIRE_DENSE));
  OB_TRY(check_enum("profile", (int)options->profile, ONEBIT_PROFILE_DEEPSPEED));
  OB_TRY(check_enum("scale", (int)options->scale, ONEBIT_SCALE_LARGEST));
  OB_TRY(check_enum("schedule", (int)options->schedule, OB_SCHEDULE_LAST));
  OB_TRY(check_enum("device", (int)options->device, ONEBIT_DEVICE_CUDA));
  return ONEBIT_OK;
}

static onebit_status_t check_sizes(const onebit_plan_options_t *options) {
  size_t block = options->block_size, chunk = options->chunk_size;
  if (block != ONEBIT_BLOCK_BUFFER && (block % OB_LANES || block > LARGEST_BLOCK))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "block_size is %zu, not a multiple of %d up to %d, nor ONEBIT_BLOCK_BUFFER",
                    block, OB_LANES, LARGEST_BLOCK);
  if (chunk % OB_LANES)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "chunk_size is %zu, not a multiple of %d", chunk,
                    OB_LANES);
  if (chunk > OB_MAX_CHUNK_ELEMENTS)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "chunk_size is %zu, but a message has at most %zu elements", chunk,
                    OB_MAX_CHUNK_ELEMENTS);
  if (options->threads < 0 || options->threads > MAX_THREADS)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "threads is %d, not 0 to %d", options->threads,
                    MAX_THREADS);
  return ONEBIT_OK;
}

static onebit_status_t check_deepspeed(const onebit_plan_options_t *options) {
  if (options->operation != ONEBIT_ALLREDUCE || options->wire != ONEBIT_WIRE_BITS)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, operation is %d, wire is %d: this "
                    "profile supports only ONEBIT_ALLREDUCE and ONEBIT_WIRE_BITS",
                    (int)options->operation, (int)options->wire);
  if (options->scale != ONEBIT_SCALE_RMS ||
      (options->block_size && options->block_size != ONEBIT_BLOCK_BUFFER))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, which fixes scale and block_size: leave "
                    "them 0");
  return ONEBIT_OK;
}

/* Checks that the other options allow this number of bits. One bit and more bits have different
 * scale rules; with more than one bit every block has a scale of its own. */
static onebit_status_t options_check_bits(const onebit_plan_options_t *options, const char *name,
                                          int bits) {
  if (!ob_width_is_known(bits))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %d, not 1, 2, 4 or 8", name, bits);
  onebit_scale_t other = bits > 1 ? ONEBIT_SCALE_MEAN_ABSOLUTE : ONEBIT_SCALE_LARGEST;
  if (options->scale == other)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "scale is %d, which messages of %d bit%s do not support",
                    (int)other, bits, bits > 1 ? "s" : "");
  if (bits == 1)
    return ONEBIT_OK;
  if (options->wire == ONEBIT_WIRE_DENSE || options->profile == ONEBIT_PROFILE_DEEPSPEED ||
      options->block_size == ONEBIT_BLOCK_BUFFER)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "%s is %d: more than one bit requires ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT "
                    "and a scale for each block",
                    name, bits);
  return ONEBIT_OK;
}

static onebit_status_t check_ladder(const onebit_plan_options_t *options) {
  OB_TRY(options_check_bits(options, "max_bits", options->max_bits));
  if (options->max_bits < options->bits)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "max_bits is %d, less than bits, %d", options->max_bits,
                    options->bits);
  if (options->max_bits > options->bits && options->no_error_feedback)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "max_bits is %d, bits is %d, no_error_feedback is set: a max_bits above bits "
                    "needs error feedback, since the residual decides when bits change",
                    options->max_bits, options->bits);
  return ONEBIT_OK;
}

/* Fills in the number of copies of residuals. One copy needs one bit, since with more bits an
 * addition cannot restore a residual. */
static onebit_status_t resolve_copies(onebit_plan_options_t *options) {
  if (options->residual_copies < 0 || options->residual_copies > 2)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "residual_copies is %d, not 1 or 2, or 0 for 2",
                    options->residual_copies);
  if (options->residual_copies == 1 && options->max_bits > 1)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "residual_copies=1 needs max_bits=1, but max_bits is %d",
                    options->max_bits);
  if (!options->residual_copies)
    options->residual_copies = 2;
  return ONEBIT_OK;
}

static void resolve_block(struct ob_plan_shape *shape) {
  onebit_plan_options_t *options = &shape->options;
  if (options->profile == ONEBIT_PROFILE_DEEPSPEED)
    options->block_size = ONEBIT_BLOCK_BUFFER;
  if (options->block_size == 0 || options->wire == ONEBIT_WIRE_DENSE)
    options->block_size = OB_DEFAULT_BLOCK;
  shape->one_scale = options->block_size == ONEBIT_BLOCK_BUFFER;
  shape->block = shape->one_scale ? RUN : options->block_size;
}

onebit_status_t ob_plan_resolve(const onebit_plan_options_t *options, struct ob_plan_shape *shape) {
  static const onebit_plan_options_t defaults = ONEBIT_PLAN_OPTIONS_INIT;
  *shape = (struct ob_plan_shape){.options = defaults};
  if (options && options->size != sizeof *options)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "options->size is %zu, not %zu: start from ONEBIT_PLAN_OPTIONS_INIT",
                    options->size, sizeof *options);
  if (options)
    shape->options = *options;
  OB_TRY(check_kinds(&shape->options));
  OB_TRY(check_sizes(&shape->options));
  if (shape->options.profile == ONEBIT_PROFILE_DEEPSPEED)
    OB_TRY(check_deepspeed(&shape->options));
  if (shape->options.bits == 0)
    shape->options.bits = 1;
  if (shape->options.max_bits == 0)
    shape->options.max_bits = shape->options.bits;
  OB_TRY(options_check_bits(&shape->options, "bits", shape->options.bits));
  OB_TRY(check_ladder(&shape->options));
  OB_TRY(resolve_copies(&shape->options));
  if (shape->options.threads == 0)
    OB_TRY(ob_knob_number(OB_KNOB_THREADS, 1, MAX_THREADS, 1, &shape->options.threads));
  resolve_block(shape);
  shape->output_dtype = shape->options.dtype;
  shape->options.no_error_feedback = !!shape->options.no_error_feedback;
  return ONEBIT_OK;
}

/* --- The choice of the schedule; schedule.c may replace an allgather by doubling ---------------*/

/* Fails if the schedule that the options request is not possible. */
static onebit_status_t check_requested_schedule(const struct onebit_plan *plan,
                                                const struct ob_plan_shape *shape) {
#define CONSTANT(constant, name) , "ONEBIT_SCHEDULE_" #constant
  static const char *const names[] = {"" OB_SCHEDULES(CONSTANT)};
#undef CONSTANT
  const onebit_plan_options_t *options = &shape->options;
  if (options->schedule <= ONEBIT_SCHEDULE_EXCHANGE)
    return ONEBIT_OK;
  if (options->operation != ONEBIT_ALLREDUCE || options->profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "schedule is %s, which supports only ONEBIT_ALLREDUCE in the default profile",
                    names[options->schedule]);
  return ob_schedule_find(options->schedule)->applicable(plan, shape);
}

/* Returns the number of elements of an allreduce's buffer. */
static size_t count_allreduce_elements(const struct ob_plan_shape *shape) {
  size_t elements = 0;
  for (size_t k = 0; k < shape->pieces; k++)
    elements += shape->counts[k];
  return elements;
}

/* Describes the plan for the cost model, with one thread. Ranks may have different numbers of
 * threads, and must still make the same choice. */
static struct ob_cost_task make_cost_task(const struct onebit_plan *plan,
                                          const struct ob_plan_shape *shape) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  const onebit_plan_options_t *options = &shape->options;
  return (struct ob_cost_task){
      .operation = options->operation,
      .elements =
          count_allreduce_elements(shape) / (shape->of_segments ? (size_t)plan->comm->size : 1),
      .block = options->block_size,
      .wire = options->wire,
      .bits = options->bits,
      .hosts = hosts->count,
      .ranks_per_host = ob_hierarchical_can_add(plan) || hosts->each == 1 ? hosts->each : 0,
      .ranks = plan->comm->size,
      .max_ranks = hosts->max,
      .schedule = options->schedule,
      .chunk = options->chunk_size,
  };
}

static bool is_between_gpus(const struct onebit_plan *plan) {
  return plan->comm->transport->put && plan->comm->size > 1;
}

/* Limits the cost model's choice. If ranks are threads, they have no network, and the default is
 * the exchange. The model has no numbers for messages between GPUs, so there the default is the
 * exchange, too. Profile deepspeed fixes the arithmetic, and so the schedule. An optimizer needs
 * messages from servers, so it uses the exchange or the hierarchical schedule. */
static void limit_schedule_choice(const struct onebit_plan *plan, const struct ob_plan_shape *shape,
                                  struct ob_cost_task *task) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  bool modelled = plan->comm->transport->network;
  bool free = (modelled || is_between_gpus(plan)) && !shape->one_scale &&
              shape->options.profile == ONEBIT_PROFILE_DEFAULT &&
              shape->options.operation == ONEBIT_ALLREDUCE;
  bool from_servers = shape->windowed || shape->from_servers;
  if (task->schedule)
    return;
  if (!free)
    task->schedule = ONEBIT_SCHEDULE_EXCHANGE;
  else if (from_servers)
    task->schedule = hosts->count > 1 && task->ranks_per_host > 1 ? ONEBIT_SCHEDULE_HIERARCHICAL
                                                                  : ONEBIT_SCHEDULE_EXCHANGE;
  else if (modelled)
    task->dense_allowed = true;
  else
    task->schedule = ONEBIT_SCHEDULE_EXCHANGE;
}

static void add_gpu_note(struct ob_cost_choice *choice) {
  size_t length = strlen(choice->text);
  snprintf(choice->text + length, sizeof choice->text - length,
           "between GPUs these times are not used: optimizers use the hierarchical schedule if "
           "possible, and an allreduce uses the exchange schedule by default\n");
}

/* Sets the requested schedule, in case the model cannot estimate its time (on one host, or dense)
 * and has chosen another one. */
static void set_requested_schedule(struct ob_cost_choice *choice, const struct ob_cost_task *task) {
  if (!task->schedule || choice->schedule == task->schedule)
    return;
  choice->schedule = task->schedule;
  snprintf(choice->text, sizeof choice->text,
           "chosen: %s, %s, because the options ask for it; the cost model has no estimate for "
           "this schedule here\n",
           ob_cost_schedule_name(choice->schedule), ob_wire_name(choice->wire, task->bits));
}

onebit_status_t ob_schedule_choose(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  OB_TRY(check_requested_schedule(plan, shape));
  struct ob_cost_task task = make_cost_task(plan, shape);
  limit_schedule_choice(plan, shape, &task);
  ob_cost_choose(&plan->comm->costs, &task, &plan->choice);
  set_requested_schedule(&plan->choice, &task);
  if (is_between_gpus(plan) && !shape->options.schedule)
    add_gpu_note(&plan->choice);
  plan->options.wire = plan->choice.wire;
  plan->schedule = ob_schedule_find(plan->choice.schedule);
  if (shape->windowed)
    plan->schedule = &ob_schedule_window;
  else if (shape->from_servers && plan->schedule->whole)
    plan->schedule = &ob_schedule_replicas;
  else if (shape->options.operation == ONEBIT_ALLGATHER)
    plan->schedule = &ob_schedule_allgather;
  return ONEBIT_OK;
}
