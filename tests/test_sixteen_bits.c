/*
 * Tests results in float16 and bfloat16. No codec, collective or optimizer may turn a finite number
 * into an infinite float16.
 */
#include <float.h>

#include "compression/codec.h"
#include "tests/support_checkpoint.h"
#include "tests/support_collectives.h"

/* --- Codecs ------------------------------------------------------------------------------------*/

enum { MOST = 4097 };
static const size_t counts[] = {1, 31, 32, 33, 64, 65, 2047, 2049, MOST};
static const float edges[] = {0.1f,           65504.0f, 65504.004f, 65519.0f, 65519.996f, 65520.0f,
                              65520.004f,     65536.0f, 1e6f,       1e30f,    FLT_MAX,    1.0f,
                              0x1.ffcffep15f, 0x1p-24f, 131008.0f,  INFINITY, NAN};
enum { EDGES = sizeof edges / sizeof edges[0] };

static float edge_value(size_t i) { return i % 3 ? edges[i % EDGES] : -edges[i % EDGES]; }

/* Returns the value to be stored. A float16 is at most 65504, and a NaN stays a NaN. */
static float expected_stored(float value, onebit_dtype_t dtype) {
  uint16_t element;
  bool beyond = dtype == ONEBIT_FLOAT16 && fabsf(value) > 65504.0f;
  oracle_store(&element, 0, dtype, beyond ? copysignf(65504.0f, value) : value);
  return oracle_load(&element, 0, dtype);
}

static void check_stored(const char *what, const uint16_t *got, size_t i, onebit_dtype_t dtype,
                         float value) {
  float wanted = expected_stored(value, dtype), is = oracle_load(got, i, dtype);
  CHECK(is == wanted || (isnan(is) && isnan(wanted)), "%s of %a as %s, element %zu: %g, not %g",
        what, (double)value, dtype_name(dtype), i, (double)is, (double)wanted);
}

static void check_convert(const struct ob_codec *codec, size_t count, onebit_dtype_t dtype) {
  static float values[MOST];
  static uint16_t out[MOST];
  for (size_t i = 0; i < count; i++)
    values[i] = edge_value(i);
  codec->convert(values, count, out, dtype);
  for (size_t i = 0; i < count; i++)
    check_stored("convert", out, i, dtype, values[i]);
}

/* Stores several scales, each with both signs. */
static void check_store(const struct ob_codec *codec, size_t count, onebit_dtype_t dtype) {
  static uint32_t bits[MOST / OB_LANES + 1];
  static uint16_t out[MOST];
  for (size_t w = 0; w <= MOST / OB_LANES; w++)
    bits[w] = (uint32_t)w * 2654435761u + 5;
  for (size_t k = 0; k < EDGES && isfinite(edges[k]); k++) {
    struct ob_store_run run = {
        .count = count, .width = 1, .bits = bits, .scale = edges[k], .output = out, .dtype = dtype};
    codec->store(&run);
    for (size_t i = 0; i < count; i++)
      check_stored("store", out, i, dtype, bits[i / 32] >> i % 32 & 1 ? -edges[k] : edges[k]);
  }
}

/* Adds two streams of signs. The scale of each is less than the largest float16, but their sum may
 * be larger. */
static void check_sum(const struct ob_codec *codec, size_t count, onebit_dtype_t dtype) {
  static const float pairs[][2] = {
      {32752.0f, 32752.0f}, {32760.0f, 32759.0f}, {32760.0f, 32760.0f}, {40000.0f, 60000.0f}};
  static uint32_t bits[2][MOST / OB_LANES + 1];
  static uint16_t out[MOST];
  const uint32_t *const streams[] = {bits[0], bits[1]};
  for (size_t w = 0; w <= MOST / OB_LANES; w++) {
    bits[0][w] = (uint32_t)w * 2654435761u + 9;
    bits[1][w] = (uint32_t)w * 0x7feb352du + 3;
  }
  for (size_t k = 0; k < sizeof pairs / sizeof pairs[0]; k++) {
    struct ob_sum_run run = {.count = count,
                             .width = 1,
                             .streams = 2,
                             .bits = streams,
                             .scales = pairs[k],
                             .output = out,
                             .dtype = dtype};
    codec->sum(&run);
    for (size_t i = 0; i < count; i++) {
      float a = bits[0][i / 32] >> i % 32 & 1 ? -pairs[k][0] : pairs[k][0];
      float b = bits[1][i / 32] >> i % 32 & 1 ? -pairs[k][1] : pairs[k][1];
      check_stored("sum", out, i, dtype, a + b);
    }
  }
}

/* Checks the 16-bit copies of parameters in an update that does not change the parameters. */
static void check_pass(const struct ob_codec *codec, size_t count, onebit_dtype_t dtype) {
  static uint32_t bits[MOST / OB_LANES + 1];
  static float parameters[MOST];
  static uint16_t copies[MOST];
  struct ob_pass_run run = {.kind = OB_PASS_APPLY_STEP,
                            .width = 1,
                            .count = count,
                            .parameter = parameters,
                            .copy = copies,
                            .copy_dtype = dtype,
                            .message = bits};
  for (size_t i = 0; i < count; i++)
    parameters[i] = edge_value(i);
  codec->pass(&run);
  for (size_t i = 0; i < count; i++)
    check_stored("copy", copies, i, dtype, parameters[i]);
}

Test(sixteen_bits, every_codec_stores_what_is_finite) {
  for (size_t row = 0; ob_codec_row(row); row++) {
    const struct ob_codec *codec = ob_codec_row(row);
    if (!ob_codec_usable(codec))
      continue;
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
      for (int k = 0; k < 2; k++) {
        onebit_dtype_t dtype = k ? ONEBIT_FLOAT16 : ONEBIT_BFLOAT16;
        check_case("codec %s, %zu elements", codec->name, counts[c]);
        check_convert(codec, counts[c], dtype);
        check_store(codec, counts[c], dtype);
        check_sum(codec, counts[c], dtype);
        check_pass(codec, counts[c], dtype);
      }
  }
}

/* --- Collectives -------------------------------------------------------------------------------*/

/* Fills in the largest numbers and zeros. The scales of their residuals are beyond the range of
 * float16, but the oracle's results are finite. */
static void fill_large(void *values, onebit_dtype_t dtype, size_t count, int rank, int step) {
  for (size_t i = 0; i < count; i++)
    oracle_store(values, i, dtype,
                 (i + (size_t)rank + (size_t)step) % 5 < 2 ? 0.0f
                 : i % 7 == 3                              ? -65504.0f
                                                           : 65504.0f);
}

static void check_operation(onebit_operation_t operation, onebit_schedule_t schedule,
                            onebit_wire_t wire) {
  static const size_t blocks[] = {32, 2048, ONEBIT_BLOCK_BUFFER};
  for (int size = 1; size <= 4; size++)
    for (size_t b = 0; b < 3; b++) {
      struct collective_case what = {.size = size, .steps = 8, .count = 3001, .fill = fill_large};
      what.options = (onebit_plan_options_t){.size = sizeof what.options,
                                             .operation = operation,
                                             .schedule = schedule,
                                             .wire = wire,
                                             .dtype = ONEBIT_FLOAT16,
                                             .block_size = blocks[b]};
      const bool hosts = schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
      what.hosts = hosts ? 2 : 1;
      if (!hosts || (size == 4 && blocks[b] != ONEBIT_BLOCK_BUFFER))
        collective_check(&what, collective_on_rank);
    }
}

Test(sixteen_bits, finite_inputs_give_finite_results) {
  check_operation(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS);
  check_operation(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS);
  check_operation(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS);
  check_operation(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_DENSE);
  check_operation(ONEBIT_ALLGATHER, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_WIRE_BITS);
  check_operation(ONEBIT_REDUCE_SCATTER, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_WIRE_BITS);
}

/* --- Parameters --------------------------------------------------------------------------------*/

enum { PARAMETERS = 77 };

struct grown {
  uint16_t parameter[PARAMETERS];
  float gradient[PARAMETERS];
  onebit_optimizer_t optimizer;
};

static void create_growing_optimizer(struct grown *grown, onebit_comm_t comm) {
  onebit_tensor_t tensor = {grown->parameter, grown->gradient, PARAMETERS, 0, 0, 0};
  onebit_momentum_options_t options = ONEBIT_MOMENTUM_OPTIONS_INIT;
  options.warmup_steps = 1000; /* all steps are warm-up */
  options.common.parameter_dtype = ONEBIT_FLOAT16;
  for (size_t i = 0; i < PARAMETERS; i++)
    oracle_store(grown->parameter, i, ONEBIT_FLOAT16, i % 2 ? 65000.0f : -65000.0f);
  CHECK_STATUS(onebit_momentum_create(comm, &tensor, 1, &options, &grown->optimizer), ONEBIT_OK);
}

static void check_parameters(const struct grown *grown, float wanted, const char *when) {
  for (size_t i = 0; i < PARAMETERS; i++) {
    float is = oracle_load(grown->parameter, i, ONEBIT_FLOAT16);
    CHECK(is == (i % 2 ? wanted : -wanted), "%s: parameter %zu is %g, not %g", when, i, (double)is,
          (double)wanted);
  }
}

static void step_all_parameters(struct grown *grown, float distance) {
  for (size_t i = 0; i < PARAMETERS; i++)
    grown->gradient[i] = i % 2 ? -1.0f : 1.0f;
  CHECK_STATUS(onebit_optimizer_step(grown->optimizer, distance), ONEBIT_OK);
}

/* The master values continue without loss, and loading a checkpoint gives the same parameters
 * again. */
Test(sixteen_bits, parameters_stay_finite) {
  struct grown first = {{0}, {0}, NULL}, second = {{0}, {0}, NULL};
  onebit_comm_t comm = self_comm();
  create_growing_optimizer(&first, comm);
  create_growing_optimizer(&second, comm);
  for (int step = 0; step < 3; step++) {
    step_all_parameters(&first, 1000.0f);
    check_parameters(&first, 65504.0f, "grown");
  }
  size_t size = 0;
  void *saved = optimizer_part(first.optimizer, &size);
  CHECK_STATUS(onebit_optimizer_load(second.optimizer, (const void *const *)&saved, &size, 1),
               ONEBIT_OK);
  check_parameters(&second, 65504.0f, "loaded");
  CHECK_BITS("loaded", second.parameter, first.parameter, PARAMETERS, ONEBIT_FLOAT16);
  free(saved);
  onebit_optimizer_destroy(first.optimizer);
  onebit_optimizer_destroy(second.optimizer);
  onebit_comm_destroy(comm);
}
