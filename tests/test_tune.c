/* Tests onebit-tune: the model of a training, and the fit. */
#include "onebit/efficient_adam.h"
#include "tests/oracle_zero_one.h"
#include "tests/support.h"
#include "tools/tune/model.h"
#include "tools/tune/tune.h"

static void ignore_tuning_file(void) { setenv("ONEBIT_TUNING", "none", 1); }
TestSuite(tune, .init = ignore_tuning_file, .timeout = 60);

static struct ob_costs default_costs(void) {
  struct ob_costs costs;
  ob_costs_default("avx2", &costs);
  return costs;
}

static const struct tune_training some_training = {.parameters = 3.4e8,
                                                   .compute = 0.25,
                                                   .steps = 100000,
                                                   .warm_up = 0.15,
                                                   .hosts = 16,
                                                   .ranks_per_host = 8};

/* --- Training */

Test(tune, break_even_is_where_the_gain_is_small) {
  struct ob_costs costs = default_costs();
  for (int m = TUNE_HALF; m < TUNE_METHODS; m++) {
    enum tune_method method = (enum tune_method)m;
    double even = tune_break_even(&costs, &some_training, method);
    struct ob_costs there = costs;
    if (isinf(even) || even == 0)
      continue;
    double faster = fmax(1, even / costs.between.bandwidth);
    there.between.bandwidth = even;
    there.mpi_byte /= faster;
    there.between.byte /= faster;
    double dense = tune_step_seconds(&there, &some_training, TUNE_DENSE, true);
    double worth = OB_STEP_WORTH * tune_step_seconds(&there, &some_training, method, true);
    cr_expect_float_eq(worth / dense, 1, 1e-6, "%s: %g", tune_method_names[m], worth / dense);
  }
  double flat = tune_break_even(&costs, &some_training, TUNE_FLAT);
  cr_expect(isfinite(flat) && flat > costs.between.bandwidth, "%g", flat);
}

Test(tune, break_even_knows_never_and_always) {
  struct ob_costs costs = default_costs();
  costs.compress = 10; /* the codec is slower than any link */
  cr_expect_eq(tune_break_even(&costs, &some_training, TUNE_FLAT), 0);
  costs = default_costs();
  costs.compress = costs.reduce = costs.reduce_stream = costs.apply = 0;
  costs.between.message = costs.inside.message = costs.inside.byte = costs.between.byte = 0;
  struct tune_training nothing_else = some_training;
  nothing_else.compute = 0;
  cr_expect(isinf(tune_break_even(&costs, &nothing_else, TUNE_FLAT)));
}

Test(tune, overlap_never_costs_and_never_hides_all) {
  struct ob_costs costs = default_costs();
  for (int m = 0; m < TUNE_METHODS; m++) {
    enum tune_method method = (enum tune_method)m;
    double step = tune_step_seconds(&costs, &some_training, method, false);
    double hidden = tune_step_seconds(&costs, &some_training, method, true);
    cr_expect_lt(hidden, step);
    cr_expect_gt(hidden, some_training.compute);
  }
}

/* Tests the factor by which a rank's computation slows down if ranks share the cores of a host, or
 * all hosts share the cores of one machine. */
Test(tune, shared_cores_multiply_the_computation) {
  static const struct {
    double cores_per_host, cores_shared, sharing;
  } rows[] = {{0, 0, 1}, {8, 0, 1}, {2, 0, 4}, {0, 32, 4}, {0, 256, 1}, {4, 16, 8}};
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    struct ob_costs costs = default_costs();
    costs.cores_per_host = rows[k].cores_per_host;
    costs.cores_shared = rows[k].cores_shared;
    const struct tune_exchange exchange = tune_exchange(&costs, &some_training, TUNE_DENSE);
    const double step = tune_step_seconds(&costs, &some_training, TUNE_DENSE, false);
    const double computing = rows[k].sharing * some_training.compute;
    cr_expect_float_eq(step - exchange.seconds, computing, 1e-9, "row %zu", k);
    const struct tune_whole whole =
        tune_whole(&costs, &some_training, &(struct tune_way){"", 1, 1, 0, 1, 1, 0});
    cr_expect_float_eq(whole.seconds - whole.waiting, some_training.steps * computing, 1e-3,
                       "row %zu", k);
  }
}

/* If the computation is long enough, it hides everything except the work of a core and the exchange
 * of the last bucket. The work of a core is MPI's handling of the bytes in a ring, or the library's
 * handling of the elements. */
Test(tune, the_work_of_a_core_is_not_hidden) {
  struct tune_training training = some_training;
  training.compute = 1e6;
  training.hosts = 4;
  training.ranks_per_host = 1;
  training.steps = 1e15;
  for (double cores = 1; cores <= 4; cores *= 2) {
    struct ob_costs costs = default_costs();
    const double n = training.parameters;
    costs.cores_per_host = cores;
    costs.add = costs.mpi_call = costs.call = costs.between.message = costs.reduce = 0;
    costs.mpi_byte = 5e-9;
    costs.reduce_stream = costs.apply = costs.between.byte = 0;
    costs.compress = 3e-9;
    const double work[] = {[TUNE_DENSE] = 6 * n * 5e-9 / cores, [TUNE_FLAT] = n * 3e-9 / cores};
    for (int m = TUNE_DENSE; m <= TUNE_FLAT; m += TUNE_FLAT - TUNE_DENSE) {
      const struct tune_exchange exchange = tune_exchange(&costs, &training, (enum tune_method)m);
      const double step = tune_step_seconds(&costs, &training, (enum tune_method)m, true);
      cr_expect_float_eq(exchange.work / work[m], 1, 1e-9, "%s", tune_method_names[m]);
      cr_expect_float_eq(step - 1e6,
                         work[m] + (exchange.seconds - work[m]) / tune_buckets(&training), 1e-6,
                         "%s", tune_method_names[m]);
    }
    costs.mpi_byte = 0; /* a fit may give 0, but a core moves the bytes all the same */
    costs.between.byte = 1e-9;
    cr_expect_float_eq(tune_exchange(&costs, &training, TUNE_DENSE).work, 12e-9 * n / cores, 1e-9);
  }
}

/* A model of less than 25 MiB has one bucket, and so has a model if an option says so. */
Test(tune, one_bucket_overlaps_nothing) {
  const struct ob_costs costs = default_costs();
  struct tune_training training = some_training;
  cr_expect_eq(tune_buckets(&training), OB_STEP_BUCKETS);
  for (int k = 0; k < 2; k++) {
    training.parameters = k ? 6e6 : 3.4e8;
    training.buckets = !k;
    for (int m = 0; m < TUNE_METHODS; m++)
      cr_expect_float_eq(tune_step_seconds(&costs, &training, (enum tune_method)m, true),
                         tune_step_seconds(&costs, &training, (enum tune_method)m, false), 1e-9,
                         "%s", tune_method_names[m]);
  }
}

/* The norm by which a program clips is known only after the last bucket. */
Test(tune, clipping_leaves_one_bit_without_overlap) {
  const struct ob_costs costs = default_costs();
  struct tune_training clipped = some_training;
  clipped.clip = true;
  for (int m = 0; m < TUNE_METHODS; m++) {
    const bool same = m == TUNE_DENSE || m == TUNE_HALF || m == TUNE_RUN;
    const double step = tune_step_seconds(&costs, &clipped, (enum tune_method)m, true);
    cr_expect_eq(step, tune_step_seconds(&costs, &some_training, (enum tune_method)m, same), "%s",
                 tune_method_names[m]);
  }
}

Test(tune, a_run_is_the_mean_of_its_steps) {
  struct ob_costs costs = default_costs();
  for (int overlap = 0; overlap < 2; overlap++) {
    double step[TUNE_METHODS];
    for (int m = 0; m < TUNE_METHODS; m++)
      step[m] = tune_step_seconds(&costs, &some_training, (enum tune_method)m, overlap);
    struct tune_training endless = some_training; /* a run so long that the warm-up is negligible */
    endless.steps = 1e15;
    double bits = fmin(tune_step_seconds(&costs, &endless, TUNE_FLAT, overlap),
                       tune_step_seconds(&costs, &endless, TUNE_HIERARCHICAL, overlap));
    cr_expect_float_eq(step[TUNE_ADAM], 0.15 * step[TUNE_DENSE] + 0.85 * bits, 1e-9);
  }
}

/* A run as long as the warm-up sends 8 bits per element. A run twice as long sends the mean of 8
 * bits and one bit. */
Test(tune, a_short_run_is_the_warm_up) {
  struct ob_costs costs = default_costs();
  struct tune_training training = some_training;
  const double one = tune_exchange_bits(&costs, &training, 1).host_bytes;
  const double eight = tune_exchange_bits(&costs, &training, 8).host_bytes;
  training.steps = ONEBIT_WARMUP_STEPS;
  cr_expect_float_eq(tune_exchange(&costs, &training, TUNE_HIERARCHICAL).host_bytes, eight, 1);
  training.steps = 2 * ONEBIT_WARMUP_STEPS;
  cr_expect_float_eq(tune_exchange(&costs, &training, TUNE_HIERARCHICAL).host_bytes,
                     (one + eight) / 2, 1);
}

/* Counts the steps of 0/1 Adam one by one, and compares their shares with those of the model. */
Test(tune, policy_is_the_optimizers) {
  for (double steps = 1; steps < 1e6; steps *= 3) {
    const onebit_zero_one_adam_options_t options = {.variance_freeze_step = TUNE_FREEZE_STEP};
    struct oracle_zero_one_clock clock = oracle_zero_one_clock_of(&options, false);
    double counts[3] = {0, 0, 0}, whole = floor(steps);
    for (double step = 0; step < whole; step++) {
      counts[oracle_zero_one_clock_next(&clock)]++;
      oracle_zero_one_clock_advance(&clock);
    }
    const struct tune_training training = {.steps = whole};
    struct tune_policy policy = tune_policy(&training, TUNE_ZERO_ONE);
    cr_expect_eq(policy.one_bit, counts[ORACLE_BITS] / whole, "%g steps", steps);
    cr_expect_eq(policy.dense, counts[ORACLE_DENSE] / whole, "%g steps", steps);
  }
}

Test(tune, bytes_of_the_methods_stand_in_their_ratios) {
  struct ob_costs costs = default_costs();
  double dense = tune_exchange(&costs, &some_training, TUNE_DENSE).host_bytes;
  double half = tune_exchange(&costs, &some_training, TUNE_HALF).host_bytes;
  double levels = tune_exchange(&costs, &some_training, TUNE_HIERARCHICAL).host_bytes;
  cr_expect_float_eq(dense / half, 2, 1e-9);
  const double warm_up = ONEBIT_WARMUP_STEPS / some_training.steps;
  const double bits = 1 + 7 * warm_up + 1.0 / 64;
  cr_expect_float_eq(dense / levels, 32 / bits * (127.0 / 128) / (15.0 / 16), 1e-6);
  cr_expect_lt(tune_exchange(&costs, &some_training, TUNE_ZERO_ONE).host_bytes, levels);
  cr_expect_eq(tune_exchange(&costs, &some_training, TUNE_SGD).host_bytes, levels);
  cr_expect_eq(tune_exchange(&costs, &some_training, TUNE_RUN).host_bytes,
               tune_exchange_bits(&costs, &some_training, 8).host_bytes);
}

/* --- A whole run */

static const struct tune_training slow_training = {
    .parameters = 1.25e8, .compute = 1, .steps = 99991, .hosts = 4, .ranks_per_host = 1};

static struct ob_costs slow_costs(double bits_a_second) {
  struct ob_costs costs = default_costs();
  costs.between.latency = costs.mpi_round = 0.04;
  costs.between.bandwidth = bits_a_second / 8;
  return costs;
}

/* A compressed exchange between K hosts sends 2(K-1)/K times the elements' bits and the scales. In
 * one bit, after every H local steps, a run sends about 1/(30 H) of the bytes of dense fp32. */
Test(tune, a_run_sends_what_its_rounds_send) {
  struct ob_costs costs = slow_costs(1e8);
  const double rounds = ceil(slow_training.steps / 30), exchanged = 1.5 * slow_training.parameters;
  for (int bits = 1; bits <= 8; bits *= 2)
    for (int fragments = 1; fragments <= 4; fragments += 3) {
      const struct tune_way way = {"", bits, bits, 0, 30, fragments, 5};
      const double bytes = tune_whole(&costs, &slow_training, &way).host_bytes;
      cr_expect_float_eq(bytes / (rounds * exchanged * (bits / 8.0 + 4.0 / 2048)), 1, 1e-6);
    }
  const struct tune_way sparse = {"", TUNE_SPARSE, TUNE_SPARSE, 0, 30, 1, 0};
  const double gathered = tune_whole(&costs, &slow_training, &sparse).host_bytes;
  cr_expect_float_eq(gathered / (rounds * 3 * slow_training.parameters * 84 / 4096), 1, 1e-6);
  const struct tune_way dense = {"", TUNE_FLOAT32, TUNE_FLOAT32, 0, 1, 1, 0};
  const struct tune_way one = {"", 1, 1, 0, 30, 1, 0};
  cr_expect_gt(tune_whole(&costs, &slow_training, &dense).host_bytes,
               900 * tune_whole(&costs, &slow_training, &one).host_bytes);
}

/* The time of a run is the mean of its dense and compressed steps, weighted by their numbers. */
Test(tune, a_warm_up_costs_its_share) {
  struct ob_costs costs = slow_costs(1e8);
  const struct tune_way dense = {"", TUNE_FLOAT32, TUNE_FLOAT32, 0, 1, 1, 0};
  const struct tune_way bits = {"", 1, 1, 0, 1, 1, 0};
  struct tune_way mixed = {"", 1, TUNE_FLOAT32, 25000, 1, 1, 0};
  const double steps = slow_training.steps, first = 25000;
  struct tune_whole all[2] = {tune_whole(&costs, &slow_training, &dense),
                              tune_whole(&costs, &slow_training, &bits)};
  struct tune_whole whole = tune_whole(&costs, &slow_training, &mixed);
  double bytes = (first * all[0].host_bytes + (steps - first) * all[1].host_bytes) / steps;
  double seconds = (first * all[0].seconds + (steps - first) * all[1].seconds) / steps;
  cr_expect_float_eq(whole.host_bytes / bytes, 1, 1e-9);
  cr_expect_float_eq(whole.seconds / seconds, 1, 1e-9);
  mixed.warm_up_bits = 8;
  cr_expect_lt(tune_whole(&costs, &slow_training, &mixed).seconds, whole.seconds);
}

/* A fragment waits for the part of an exchange that `delay` steps do not hide, and at least as long
 * as the codec takes. */
Test(tune, delay_hides_the_exchange) {
  struct ob_costs costs = slow_costs(1e8);
  struct tune_way way = {"", 4, 4, 0, 30, 1, 0};
  const double rounds = ceil(slow_training.steps / 30);
  const struct tune_whole blocking = tune_whole(&costs, &slow_training, &way);
  cr_expect_float_eq(blocking.waiting / (rounds * blocking.exchange), 1, 1e-9);
  way.delay = 3;
  const struct tune_whole later = tune_whole(&costs, &slow_training, &way);
  cr_expect_float_eq(blocking.waiting - later.waiting, rounds * 3 * slow_training.compute, 1e-3);
  way.delay = 30;
  const struct tune_whole hidden = tune_whole(&costs, &slow_training, &way);
  cr_expect(hidden.waiting > 0 && hidden.waiting < 0.05 * blocking.waiting, "%g", hidden.waiting);
  way.fragments = 2;
  cr_expect(tune_way_error(&way), "two exchanges would be on the way at once");
  way.delay = 15;
  cr_expect(!tune_way_error(&way));
}

/* With slower and slower links, the chosen settings change the training more and more. Their time
 * must stay close to the time without a network, or to that of the fastest settings. */
Test(tune, chooses_the_mildest_way_that_is_fast) {
  const struct tune_wanted wanted = {.bits = -1, .delay = -1};
  struct tune_way ways[TUNE_WAYS];
  size_t last = 0, count = tune_list_ways(&wanted, ways);
  for (double link = 1e12; link > 1e4; link /= 3) {
    struct ob_costs costs = slow_costs(link);
    costs.mpi_byte = 0;
    size_t chosen = tune_choose_way(&costs, &slow_training, ways, count);
    double least = INFINITY, bound = TUNE_NEAR * slow_training.steps * slow_training.compute;
    cr_assert_lt(chosen, count);
    cr_expect_geq(chosen, last, "%g bit/s", link);
    for (size_t k = 0; k < count; k++) {
      double seconds = tune_whole(&costs, &slow_training, &ways[k]).seconds;
      least = fmin(least, seconds);
      cr_expect(k >= chosen || seconds > bound, "%g bit/s: %zu before %zu", link, k, chosen);
    }
    double seconds = tune_whole(&costs, &slow_training, &ways[chosen]).seconds;
    cr_expect(seconds <= bound || seconds == least, "%g bit/s", link);
    last = chosen;
  }
  cr_expect_gt(last, 2);
}

Test(tune, ways_are_what_is_asked_for) {
  struct tune_way ways[TUNE_WAYS];
  const struct tune_wanted wanted = {50, 2, 5, 10};
  cr_assert_eq(tune_list_ways(&wanted, ways), 3);
  const struct tune_way *way = &ways[2];
  cr_expect(way->local_steps == 50 && way->bits == 2 && way->fragments == 5 && way->delay == 10);
  cr_expect(ways[1].warm_up_steps == ONEBIT_WARMUP_STEPS && ways[1].local_steps == 1);
}

/* --- The fit: from other start values it must find the costs that gave the measurements. */

static void add_measurements(const struct ob_costs *truth, struct tune_points *points) {
  for (size_t elements = 1; elements <= (size_t)1 << 24; elements *= 16)
    for (int mpi = 0; mpi < 2; mpi++) {
      struct tune_point point = {.mpi = mpi,
                                 .task = {.elements = elements,
                                          .hosts = 4,
                                          .ranks_per_host = 1,
                                          .ranks = 4,
                                          .max_ranks = 1,
                                          .chunk = 65536,
                                          .schedule = ONEBIT_SCHEDULE_EXCHANGE}};
      point.measured = tune_point_seconds(truth, &point);
      points->point[points->count++] = point;
    }
}

Test(tune, fit_finds_what_made_the_measurements) {
  struct ob_costs truth = default_costs(), costs = default_costs();
  struct tune_points points = {.count = 0};
  truth.exchange_efficiency = 0.6;
  truth.between.message = 9e-6;
  truth.call = 90e-6;
  truth.mpi_call = 40e-6;
  truth.mpi_efficiency = 0.6;
  truth.mpi_byte = 0;
  add_measurements(&truth, &points);
  tune_fit(&costs, &points);
  cr_expect_lt(costs.residual, 0.05);
  cr_expect(!tune_is_doubtful(&costs));
  cr_expect_float_eq(costs.mpi_efficiency, 0.6, 0.03);
  for (size_t i = 0; i < points.count; i++)
    cr_expect_float_eq(points.point[i].predicted / points.point[i].measured, 1, 0.15);
}

Test(tune, fit_bears_one_wild_measurement) {
  struct ob_costs truth = default_costs(), costs = default_costs();
  struct tune_points points = {.count = 0};
  add_measurements(&truth, &points);
  points.point[4].measured *= 30;
  tune_fit(&costs, &points);
  cr_expect_float_eq(
      points.point[points.count - 1].predicted / points.point[points.count - 1].measured, 1, 0.1);
  cr_expect_float_eq(
      points.point[points.count - 2].predicted / points.point[points.count - 2].measured, 1, 0.1);
}

Test(tune, fit_of_a_busy_host_is_doubtful) {
  struct ob_costs truth = default_costs(), costs = default_costs();
  struct tune_points points = {.count = 0};
  add_measurements(&truth, &points);
  for (size_t i = 0; i < points.count; i++)
    points.point[i].measured *= i / 2 % 2 ? 20 : 1;
  tune_fit(&costs, &points);
  cr_expect(tune_is_doubtful(&costs), "off by %g", exp(costs.residual));
}

/* --- GPUs */

static struct tune_card card_with_link(double link) {
  struct tune_card card = tune_card_default;
  card.link = link;
  return card;
}

/* Without launch costs only memory bandwidth counts. 1-bit Adam's step on 8 ranks moves 12.26 +
 * 12.13 bytes per parameter and an eighth of the reduce kernel's 9.15. A fused dense step moves 28
 * bytes per parameter (docs/cuda.md). */
Test(tune, kernels_take_what_their_bytes_take) {
  struct tune_card card = card_with_link(0);
  const struct tune_training host = {.parameters = 1e9, .hosts = 1, .ranks_per_host = 8};
  card.launch = card.group = 0;
  double bits = tune_card_update(&card, &host, TUNE_FLAT).kernels * card.copy / host.parameters;
  double dense = tune_card_update(&card, &host, TUNE_DENSE).kernels * card.copy / host.parameters;
  cr_expect_float_eq(bits, 12.26 + 12.13 + 9.15 / 8, 0.01, "%g", bits);
  cr_expect_float_eq(dense, 28, 1e-9, "%g", dense);
}

/* Chunks are counted as cuda/device.c cuts them, with 7 kernels per chunk, or 4. */
Test(tune, small_tensors_cost_launches) {
  struct tune_card card = card_with_link(0);
  struct tune_training host = {.parameters = 1000, .hosts = 1, .ranks_per_host = 8};
  struct tune_update update = tune_card_update(&card, &host, TUNE_FLAT);
  cr_expect_eq(update.launches, 5);
  cr_expect_eq(update.groups, 2);
  cr_expect_float_eq(update.kernels, 5 * card.launch, 1e-8);
  cr_expect_float_eq(update.messages, 2 * card.group, 1e-8);
  host.parameters = 64 << 20;
  update = tune_card_update(&card, &host, TUNE_FLAT);
  cr_expect_eq(update.launches, 1 + 4 * 7);
  cr_expect_eq(update.groups, 4 * 2);
}

Test(tune, a_slow_link_takes_what_its_bytes_take) {
  struct tune_card card = card_with_link(1e8);
  static const struct tune_training hosts = {
      .parameters = 1e9, .steps = 1e5, .hosts = 2, .ranks_per_host = 8};
  static const double bits = 1.0 / 8 + 4.0 / 2048;
  const double wanted[] = {4e9, 2e9, 2 * 8 * 8 / 16.0 * 1e9 * bits, 1e9 * bits};
  for (int m = TUNE_DENSE; m <= TUNE_HIERARCHICAL; m++) {
    struct tune_update update = tune_card_update(&card, &hosts, (enum tune_method)m);
    cr_expect_float_eq(update.host_bytes / wanted[m], 1, 1e-9, "%s: %g", tune_method_names[m],
                       update.host_bytes);
    cr_expect_float_eq(update.messages / (wanted[m] / card.link), 1, 0.01, "%s: %g",
                       tune_method_names[m], update.messages);
    cr_expect_leq(update.together, update.kernels + update.messages);
  }
  cr_expect_lt(tune_card_update(&card, &hosts, TUNE_ZERO_ONE).host_bytes, wanted[3]);
}

/* A billion parameters on 4 hosts of 8 GPUs. The copies and the processors' work cover, for each
 * GPU, all parameters (TUNE_STAGED) or an eighth of them (TUNE_STAGED_SHARES). The bits that a host
 * sends are the same in both cases. */
Test(tune, staged_gpus_take_what_copies_and_processors_take) {
  struct tune_card card = card_with_link(1.25e8);
  const struct tune_training hosts = {.parameters = 1e9, .hosts = 4, .ranks_per_host = 8};
  static const double bits = 1.0 / 8 + 4.0 / 2048;
  card.latency = card.group = 0;
  struct tune_update each = tune_card_update(&card, &hosts, TUNE_STAGED);
  struct tune_update share = tune_card_update(&card, &hosts, TUNE_STAGED_SHARES);
  cr_expect_float_eq(each.kernels, 8 / 25.0 + 8 * 26 / 300.0, 1e-9, "%g", each.kernels);
  cr_expect_float_eq(share.kernels, 1 / 25.0 + 26 / 300.0, 1e-9, "%g", share.kernels);
  cr_expect_float_eq(each.messages, 1.5e9 * bits / 1.25e8, 1e-9, "%g", each.messages);
  cr_expect_float_eq(share.messages, each.messages + 7 / 450.0, 1e-9, "%g", share.messages);
  cr_expect_float_eq(share.together, share.kernels + share.messages, 1e-12);
}
