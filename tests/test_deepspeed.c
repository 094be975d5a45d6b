/*
 * Compares profile deepspeed with numbers that DeepSpeed's own code printed in two small runs (its
 * compressed allreduce and OnebitAdam, two ranks, twenty elements). The numbers are copied here as
 * data.
 */
#include "optimizers/optimizer.h"
#include "tests/support.h"

#define COUNT  20
#define PADDED 32 /* a multiple of 2 * lcm(2, 8) */
#define CHUNK  16
#define CALLS  3

/* The scales and signs that DeepSpeed's allreduce sent in three calls with the same input. Bit 7 of
 * a byte is the first element's sign, 1 for not negative. */
static const struct call {
  float worker_scale[2], server_scale[2];
  unsigned worker_bits[2];
  unsigned server_bits[2];
} calls[CALLS] = {
    {{0.3202172f, 0.1887976f},
     {0.1957662f, 0.2545074f},
     {0x5b4b6fff, 0x2d696fff},
     {0x5b4b, 0x6fff}},
    {{0.4821880f, 0.2843834f},
     {0.3067977f, 0.3602321f},
     {0x526a4000, 0x652b2000},
     {0x646a, 0x4000}},
    {{0.5032356f, 0.3021472f},
     {0.4351873f, 0.3862432f},
     {0x3b476fff, 0x2f617fff},
     {0x3b63, 0x6fff}},
};

/* The norms of the residuals after the first call, and rank 0's residual of the padding after each
 * call. */
static const double worker_norm[2] = {1.4420331, 0.8506879}, server_norm[2] = {0.3865973, 0.0};
static const double padding_error[CALLS] = {-0.3202172, 0.1619708, -0.3412649};

/* The tolerance for these numbers, which have seven digits after the decimal point. */
#define PRINTED 1e-6

static bool is_near(double a, double b) { return fabs(a - b) <= PRINTED; }

static double norm_of(const float *values, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sqrt(sum);
}

static void fill_values(float *input, int rank) {
  for (int i = 0; i < COUNT; i++)
    input[i] = rank == 0 ? (float)(7 * i % 11 - 5) / 8.0f : (float)(5 * i % 13 - 6) / 16.0f;
}

/* Returns the sign of element i. `bits` is one number that holds `bytes` of DeepSpeed's packed
 * bytes. */
static float unpack_sign(unsigned bits, int bytes, int i) {
  return bits >> (8 * bytes - 1 - i) & 1 ? 1.0f : -1.0f;
}

/* Checks the values that a rank sent. They follow from its residuals: before + input = sent +
 * after. */
static void check_worker(const struct call *call, int rank, const float *input, const float *before,
                         const float *after) {
  for (int i = 0; i < PADDED; i++) {
    double sent = (double)before[i] + (double)(i < COUNT ? input[i] : 0.0f) - (double)after[i];
    double wanted = (double)(unpack_sign(call->worker_bits[rank], 4, i) * call->worker_scale[rank]);
    CHECK(is_near(sent, wanted), "element %d was sent as %.7f, not %.7f", i, sent, wanted);
  }
}

static void check_result(const struct call *call, const float *result) {
  for (int i = 0; i < COUNT; i++) {
    int server = i / CHUNK;
    float wanted =
        unpack_sign(call->server_bits[server], 2, i % CHUNK) * call->server_scale[server];
    CHECK(is_near((double)result[i], (double)wanted), "result %d is %.7f, not %.7f", i,
          (double)result[i], (double)wanted);
  }
}

static void make_three_calls(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  float input[COUNT], result[COUNT], before[PADDED], after[PADDED] = {0}, server[CHUNK];
  onebit_plan_t plan;
  (void)context;
  onebit_plan_options_t options = {.size = sizeof options, .profile = ONEBIT_PROFILE_DEEPSPEED};
  fill_values(input, rank);
  if (!CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK))
    return;
  const onebit_plan_info_t info = plan_info(plan);
  CHECK(info.worker_residual_count == PADDED && info.server_residual_count == CHUNK,
        "errors of %zu and %zu floats", info.worker_residual_count, info.server_residual_count);
  for (int k = 0; k < CALLS; k++) {
    check_case("call %d", k);
    memcpy(before, after, sizeof before);
    CHECK_STATUS(onebit_allreduce(input, result, plan), ONEBIT_OK);
    CHECK_STATUS(onebit_plan_export_residual(plan, after, server), ONEBIT_OK);
    check_result(&calls[k], result);
    check_worker(&calls[k], rank, input, before, after);
    CHECK(rank != 0 || is_near((double)after[PADDED - 1], padding_error[k]), "padding keeps %.7f",
          (double)after[PADDED - 1]);
    CHECK(k != 0 || (is_near(norm_of(after, PADDED), worker_norm[rank]) &&
                     is_near(norm_of(server, CHUNK), server_norm[rank])),
          "norms of the errors are %.7f and %.7f", norm_of(after, PADDED), norm_of(server, CHUNK));
  }
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(deepspeed, allreduce_gives_the_printed_numbers) { on_ranks(2, make_three_calls, NULL); }

/* The first four parameters and momenta of OnebitAdam with rate 0.01, decay 0.01 and freeze_step 4,
 * which gives three steps of warm-up. */
static const struct moment {
  int step;
  double parameter[4], momentum[4];
} moments[] = {
    {0, {-0.7183022, 0.0316227, 0.7183024, -0.2815977}, {-0.03125, -0.0125, 0.00625, 0.025}},
    {2,
     {-0.6615347, 0.0092935, 0.7473868, -0.3373194},
     {-0.0446875, 0.006125, -0.0049375, 0.045875}},
    {3,
     {-0.6469675, -0.0112141, 0.7268082, -0.3517836},
     {-0.0185626, 0.0185626, 0.0185626, 0.0185626}},
    {7,
     {-0.5976414, -0.0193356, 0.7346424, -0.3458980},
     {-0.0277276, -0.0277276, 0.0277276, 0.0277276}},
};
#define ADAM_STEPS 8
static const double last_norm = 2.4423587;                                /* of the parameters */
static const double variance[4] = {1.639e-4, 8.19e-5, 8.20e-5, 1.639e-4}; /* frozen */
#define RATE  0.01
#define DECAY 0.01

static void fill_gradient(float *gradient, int step, int rank) {
  for (int i = 0; i < COUNT; i++)
    gradient[i] = (float)((7 * i + 3 * step + 5 * rank) % 11 - 5) / 8.0f;
}

/* Checks the momentum of the compressed stage from the movement of the parameter: before - after =
 * rate (m / sqrt(v) + decay before). The printed variance has only three to four digits. */
static void check_momentum(const struct moment *moment, const float *before, const float *after) {
  for (int i = 0; i < 4; i++) {
    double moved = (double)before[i] - (double)after[i];
    double m = (moved / RATE - DECAY * (double)before[i]) * sqrt(variance[i]);
    CHECK(fabs(m - moment->momentum[i]) <= 2e-3 * fabs(moment->momentum[i]),
          "step %d: momentum %d is about %.7f, not %.7f", moment->step, i, m, moment->momentum[i]);
  }
}

static void check_moment(int step, const float *before, const float *after) {
  for (size_t k = 0; k < sizeof moments / sizeof moments[0]; k++) {
    if (moments[k].step != step)
      continue;
    for (int i = 0; i < 4; i++)
      CHECK(is_near((double)after[i], moments[k].parameter[i]),
            "step %d: parameter %d is %.7f, not %.7f", step, i, (double)after[i],
            moments[k].parameter[i]);
    if (step >= 3)
      check_momentum(&moments[k], before, after);
  }
}

static void make_eight_steps(onebit_comm_t comm, void *context) {
  float parameter[COUNT], gradient[COUNT], before[COUNT];
  onebit_tensor_t tensor = {parameter, gradient, COUNT, (float)DECAY, 0, 0};
  onebit_optimizer_t optimizer;
  (void)context;
  onebit_adam_options_t options = {
      .size = sizeof options, .common.profile = ONEBIT_PROFILE_DEEPSPEED, .freeze_step = 4};
  for (int i = 0; i < COUNT; i++)
    parameter[i] = (float)(3 * i % 7 - 3) / 4.0f;
  if (!CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < ADAM_STEPS; step++) {
    const onebit_optimizer_info_t info = optimizer_info(optimizer);
    CHECK((info.stage == ONEBIT_STAGE_COMPRESSED) == (step >= 3), "stage %d before step %d",
          (int)info.stage, step);
    memcpy(before, parameter, sizeof before);
    fill_gradient(gradient, step, onebit_comm_rank(comm));
    CHECK_STATUS(onebit_optimizer_step(optimizer, (float)RATE), ONEBIT_OK);
    check_moment(step, before, parameter);
  }
  CHECK(is_near(norm_of(parameter, COUNT), last_norm), "norm %.7f", norm_of(parameter, COUNT));
  onebit_optimizer_destroy(optimizer);
}

Test(deepspeed, adam_gives_the_printed_numbers) { on_ranks(2, make_eight_steps, NULL); }

/* DeepSpeed also counts its first call, which makes no step. */
Test(deepspeed, freezes_a_step_earlier) {
  static const size_t wanted[][2] = {{1, 1}, {2, 1}, {3, 2}, {4, 3}, {100, 99}};
  for (size_t k = 0; k < sizeof wanted / sizeof wanted[0]; k++) {
    float parameter = 0, gradient = 0;
    const onebit_tensor_t tensor = {.parameter = &parameter, .gradient = &gradient, .count = 1};
    onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
    onebit_optimizer_t optimizer = NULL;
    options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    options.freeze_step = wanted[k][0];
    onebit_comm_t comm = self_comm();
    CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
    CHECK(ob_freeze_last_step(optimizer) == wanted[k][1], "freeze_step %zu: after step %zu",
          wanted[k][0], ob_freeze_last_step(optimizer));
    onebit_optimizer_destroy(optimizer);
    onebit_comm_destroy(comm);
  }
}

/*
 * Compares 1-bit LAMB in profile deepspeed with numbers that DeepSpeed's own OnebitLamb printed in
 * a small run with two ranks and two tensors. The numbers are copied here as data. The first rank's
 * share ends inside the second tensor, and padding follows this tensor.
 */

#define ROWS       3
#define COLUMNS    4
#define FIRST      (ROWS * COLUMNS)
#define SECOND     6
#define LAMB_COUNT (FIRST + SECOND)
#define LAMB_STEPS 10
#define LAMB_RATE  0.01f
#define LAMB_DECAY 0.01f

/* The first four parameters of both tensors, the trust ratios that multiply their learning rates,
 * and LAMB's factors. */
static const struct lamb_moment {
  int step;
  double first[4], second[4], ratio[2], factor[2];
} lamb_moments[] = {
    {0,
     {-0.7446057, -0.49461, -0.2553772, -0.0053815},
     {-0.9923382, -0.5076255, 0.0076376, 0.5076256},
     {0.1701783, 0.2415243},
     {1, 1}},
    {3,
     {-0.726145, -0.5069437, -0.2426984, -0.0264583},
     {-0.9669251, -0.5371531, 0.0235876, 0.51287},
     {0.2523899, 0.28073},
     {1, 1}},
    {4,
     {-0.7253155, -0.5077632, -0.2416766, -0.025596},
     {-0.9658026, -0.5359891, 0.0250635, 0.5115572},
     {0.0776104, 0.0850978},
     {0.9950033, 1.0000769}},
    {9,
     {-0.7216897, -0.5065414, -0.2457411, -0.0268547},
     {-0.9623883, -0.5363703, 0.026201, 0.5162705},
     {0.0666715, 0.0532888},
     {0.8547606, 0.6262545}},
};
static const double coefficient[2] = {0.0780002, 0.0850913}, scaling[2] = {0.7447777, 1.5213347};
static const double last_padding = -0.0069073;

/* Compares with a number that is printed with seven digits after the decimal point. */
static void check_near(const char *what, int step, int i, double got, double wanted) {
  CHECK(fabs(got - wanted) <= 1e-6, "step %d: %s %d is %.7f, not %.7f", step, what, i, got, wanted);
}

static void fill_gradients(float *gradient, int step, int rank) {
  for (int i = 0; i < FIRST; i++)
    gradient[i] = (float)((7 * i + 3 * step + 5 * rank) % 11 - 5) / 8.0f;
  for (int i = 0; i < SECOND; i++)
    gradient[FIRST + i] = (float)((5 * i + 2 * step + 3 * rank) % 13 - 6) / 32.0f;
}

static void fill_parameters(float *parameter) {
  for (int i = 0; i < FIRST; i++)
    parameter[i] = (float)((3 * (i / COLUMNS) + i % COLUMNS) % 7 - 3) / 4.0f;
  for (int i = 0; i < SECOND; i++)
    parameter[FIRST + i] = (float)(i % 5 - 2) / 2.0f;
}

/* Returns the number of the piece that is tensor t in the only bucket. */
static size_t find_piece(const struct ob_bucket *bucket, size_t t) {
  size_t k = 0;
  while (bucket->tensor_of[k] != t)
    k++;
  return k;
}

static void check_lamb_moment(onebit_optimizer_t optimizer, int step, const float *parameter) {
  const struct ob_lamb *lamb = optimizer->own;
  const struct ob_bucket *bucket = &optimizer->buckets[0];
  for (size_t k = 0; k < sizeof lamb_moments / sizeof lamb_moments[0]; k++) {
    if (lamb_moments[k].step != step)
      continue;
    for (int i = 0; i < 4; i++) {
      check_near("parameter of the first", step, i, (double)parameter[i], lamb_moments[k].first[i]);
      check_near("parameter of the second", step, i, (double)parameter[FIRST + i],
                 lamb_moments[k].second[i]);
    }
    for (size_t t = 0; t < 2; t++) {
      double ratio = (double)(bucket->learning_rates[find_piece(bucket, t)] / LAMB_RATE);
      check_near("ratio", step, (int)t, ratio, lamb_moments[k].ratio[t]);
      check_near("factor", step, (int)t, lamb->factors[t], lamb_moments[k].factor[t]);
    }
  }
}

/* Returns the momentum of padding in the last message. All padding is in the last share. */
static double padding_momentum(const struct ob_bucket *bucket) {
  struct ob_message_shape shape = ob_plan_message(bucket->bits, 1, 0);
  struct ob_view view = ob_message_view(ob_plan_result(bucket->bits, false, 1, 0), &shape);
  const struct ob_piece *last =
      &ob_plan_layout(bucket->bits)->piece[ob_plan_layout(bucket->bits)->pieces - 1];
  size_t word = last->first_word - ob_layout_word(ob_plan_layout(bucket->bits), shape.first);
  CHECK(bucket->tensor_of[ob_plan_layout(bucket->bits)->pieces - 1] == 2 &&
            last->count == 32 - LAMB_COUNT,
        "the last piece is no padding");
  CHECK(view.words[word] == 0 || view.words[word] == (1u << last->count) - 1,
        "the padding's signs are %x", (unsigned)view.words[word]);
  return (double)(view.words[word] ? -view.header->scale : view.header->scale);
}

static void check_final_state(onebit_optimizer_t optimizer) {
  const struct ob_lamb *lamb = optimizer->own;
  const struct ob_bucket *bucket = &optimizer->buckets[0];
  for (size_t t = 0; t < 2; t++) {
    check_near("coefficient", LAMB_STEPS, (int)t, lamb->coefficients[t], coefficient[t]);
    check_near("scaling", LAMB_STEPS, (int)t, (double)bucket->scalings[find_piece(bucket, t)],
               scaling[t]);
  }
  check_near("padding", LAMB_STEPS, 0, padding_momentum(bucket), last_padding);
}

static void make_ten_steps(onebit_comm_t comm, void *context) {
  float parameter[LAMB_COUNT], gradient[LAMB_COUNT];
  onebit_tensor_t tensors[2] = {{parameter, gradient, FIRST, LAMB_DECAY, 0, 0},
                                {parameter + FIRST, gradient + FIRST, SECOND, LAMB_DECAY, 0, 0}};
  onebit_optimizer_t optimizer;
  (void)context;
  onebit_lamb_options_t options = {
      .size = sizeof options, .common.profile = ONEBIT_PROFILE_DEEPSPEED, .freeze_step = 5};
  fill_parameters(parameter);
  if (!CHECK_STATUS(onebit_lamb_create(comm, tensors, 2, &options, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < LAMB_STEPS; step++) {
    fill_gradients(gradient, step, onebit_comm_rank(comm));
    CHECK_STATUS(onebit_optimizer_step(optimizer, LAMB_RATE), ONEBIT_OK);
    check_lamb_moment(optimizer, step, parameter);
  }
  check_final_state(optimizer);
  onebit_optimizer_destroy(optimizer);
}

Test(deepspeed_lamb, gives_the_printed_numbers) { on_ranks(2, make_ten_steps, NULL); }
