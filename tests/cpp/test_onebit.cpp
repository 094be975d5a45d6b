// Tests of the C++ handles: ownership, exceptions, and that no rank hangs. The program prints
// failed checks and ends with status 1; tests/scripts/check-cpp compiles and runs it.
#include <onebit/onebit.hpp>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

using onebit::communicator;

#define EXPECT(condition)                                                                          \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                 \
      std::exit(1);                                                                                \
    }                                                                                              \
  } while (0)

static_assert(!std::is_copy_constructible<onebit::plan>::value, "handles are not copied");
static_assert(!std::is_copy_assignable<communicator>::value, "handles are not copied");
static_assert(std::is_nothrow_move_constructible<onebit::request>::value, "but moved");
static_assert(std::is_nothrow_move_assignable<onebit::adam>::value, "but moved");
static_assert(!std::is_constructible<onebit::output, const std::vector<float> &>::value &&
                  !std::is_constructible<onebit::output, const float (&)[3]>::value,
              "a constant is no output");

// Returns the status of the exception that `work` throws, or ONEBIT_OK.
static onebit_status_t catch_status(const std::function<void()> &work,
                                    std::string *words = nullptr) {
  try {
    work();
  } catch (const onebit::error &error) {
    if (words)
      *words = error.what();
    return error.status();
  }
  return ONEBIT_OK;
}

// Runs a body on each of `size` ranks, which are threads.
static void run_on_ranks(int size, const std::function<void(communicator &)> &body) {
  std::vector<communicator> ranks = communicator::loopback(size);
  std::vector<std::thread> threads;
  for (communicator &rank : ranks)
    threads.emplace_back([&rank, &body] { body(rank); });
  for (std::thread &thread : threads)
    thread.join();
}

static std::vector<float> make_values(int seed, std::size_t count) {
  std::vector<float> made(count);
  for (std::size_t i = 0; i < count; i++)
    made[i] = static_cast<float>((static_cast<int>(i) * 37 + seed * 11) % 23 - 11);
  return made;
}

static void errors_have_status_and_words() {
  std::string words;
  EXPECT(catch_status([] { communicator::loopback(0); }, &words) == ONEBIT_ERROR_ARGUMENT);
  EXPECT(words.find("ONEBIT_ERROR_ARGUMENT: ") == 0 && words.find("0") != std::string::npos);
  EXPECT(catch_status([] { communicator::loopback(-3); }) == ONEBIT_ERROR_ARGUMENT);
  EXPECT(onebit::check(ONEBIT_SKIPPED) == ONEBIT_SKIPPED);
  EXPECT(onebit::check(ONEBIT_WARNING) == ONEBIT_WARNING);
  EXPECT(onebit::check(ONEBIT_IN_PROGRESS) == ONEBIT_IN_PROGRESS);
  EXPECT(catch_status([] { onebit::check(ONEBIT_ERROR_PEER); }) == ONEBIT_ERROR_PEER);
}

static void handles_move() {
  communicator first = communicator::self(), second;
  const onebit_comm_t held = first.get();
  EXPECT(first && !second && first.size() == 1 && first.rank() == 0 && first.hosts() == 1);
  onebit::communicator third = onebit::communicator::self();
  third.abort();
  EXPECT(third.shrink().size() == 1);
  second = std::move(first);
  EXPECT(!first && second.get() == held);
  communicator &same = second;
  second = std::move(same);
  EXPECT(second.get() == held);
  onebit::plan plan(second, 100), other = std::move(plan);
  std::vector<float> x = make_values(1, 100);
  EXPECT(!plan && other.allreduce(x) == ONEBIT_OK);
  EXPECT(catch_status([&] { plan.allreduce(x); }) == ONEBIT_ERROR_ARGUMENT);
  onebit_plan_destroy(other.release());
  EXPECT(!other);
  communicator adopted(second.release());
  EXPECT(adopted.get() == held);
}

static void collectives_give_what_c_gives() {
  run_on_ranks(3, [](communicator &comm) {
    const std::size_t n = 5000;
    const std::vector<float> mine = make_values(comm.rank(), n);
    std::vector<float> result(n), expected(n), in_place = mine;
    onebit::plan plan(comm, n), again(comm, n);
    onebit_plan_t c = nullptr;
    EXPECT(onebit_plan_create(comm.get(), n, nullptr, &c) == ONEBIT_OK);
    for (int call = 0; call < 3; call++) {
      EXPECT(onebit_allreduce(mine.data(), expected.data(), c) == ONEBIT_OK);
      EXPECT(plan.allreduce(mine, result) == ONEBIT_OK && result == expected);
    }
    EXPECT(again.allreduce(in_place) == ONEBIT_OK);
    onebit_plan_destroy(c);
    EXPECT(plan.info().worker_residual_count == n && std::string(plan.explain()).size() > 0);
    std::vector<float> kept(n);
    plan.export_residual(kept.data(), nullptr);
    EXPECT(kept != std::vector<float>(n));
    plan.import_residual(kept.data(), nullptr);
    plan.reset_residual();
    plan.export_residual(kept.data(), nullptr);
    EXPECT(kept == std::vector<float>(n));
  });
}

static void operations_know_their_buffers() {
  run_on_ranks(2, [](communicator &comm) {
    onebit::plan_options options;
    options.wire = ONEBIT_WIRE_DENSE;
    options.operation = ONEBIT_ALLGATHER;
    const std::array<float, 2> mine = {{static_cast<float>(comm.rank()), 5.0F}};
    float all[4] = {};
    onebit::plan gather(comm, 2, options);
    EXPECT(gather.allgather(mine, all) == ONEBIT_OK && all[0] == 0 && all[2] == 1 && all[3] == 5);
    EXPECT(gather.iallgather({mine.data(), 2}, {all, 4}).wait() == ONEBIT_OK && all[1] == 5);
    options.operation = ONEBIT_REDUCE_SCATTER;
    onebit::plan scatter(comm, 2, options);
    const std::vector<float> four = {1, 2, 3, 4};
    float share[2] = {};
    EXPECT(scatter.reduce_scatter(four, share) == ONEBIT_OK &&
           share[0] == four[2u * static_cast<unsigned>(comm.rank())]);
    EXPECT(scatter.ireduce_scatter(four, share).wait() == ONEBIT_OK);
    options.operation = ONEBIT_ALLREDUCE;
    options.wire = ONEBIT_WIRE_BITS;
    options.dtype = ONEBIT_BFLOAT16;
    onebit::plan halves(comm, 2, options);
    std::uint16_t bits[2] = {0x3f80, 0xbf80}; // 1 and -1
    EXPECT(halves.allreduce(bits) == ONEBIT_OK && bits[0] == 0x3f80 && bits[1] == 0xbf80);
    EXPECT(catch_status([&] { halves.allreduce(share); }) == ONEBIT_ERROR_ARGUMENT);
  });
}

static void requests_are_waited_for() {
  run_on_ranks(2, [](communicator &comm) {
    const std::size_t n = 100000;
    std::vector<float> a = make_values(comm.rank(), n), b(n), c(n);
    onebit::plan first(comm, n), second(comm, n);
    onebit::request request = first.iallreduce(a, b), moved = std::move(request);
    EXPECT(!request && request.wait() == ONEBIT_OK);
    EXPECT(catch_status([&] { first.allreduce(a, b); }) == ONEBIT_ERROR_BUSY || !moved);
    { onebit::request forgotten = second.iallreduce(a, c); }
    EXPECT(second.allreduce(a, c) == ONEBIT_OK);
    onebit_status_t status;
    while ((status = moved.test()) == ONEBIT_IN_PROGRESS)
      comm.progress();
    EXPECT(status == ONEBIT_OK && !moved);
    EXPECT(comm.bytes_sent() > 0);
  });
}

static void a_buffer_that_does_not_fit_hangs_nobody() {
  run_on_ranks(3, [](communicator &comm) {
    const bool wrong = comm.rank() == 1;
    const onebit_status_t expected = wrong ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER;
    std::vector<float> x = make_values(comm.rank(), 1000), small(999);
    onebit::plan plan(comm, 1000);
    std::string words;
    EXPECT(catch_status([&] { plan.allreduce(wrong ? small : x, x); }, &words) == expected);
    EXPECT(!wrong || words.find("999 elements of 4 bytes, the plan 1000") != std::string::npos);
    EXPECT(catch_status([&] { plan.allreduce(x, wrong ? small : x); }, &words) == expected);
    EXPECT(!wrong || words.find("to receive has 999") != std::string::npos);
    EXPECT(catch_status([&] { plan.iallreduce(wrong ? small : x, x).wait(); }) == expected);
    EXPECT(plan.allreduce(x) == ONEBIT_OK);
  });
}

static void what_is_not_finite_is_skipped() {
  run_on_ranks(2, [](communicator &comm) {
    std::vector<float> x(64, 1.0F), y(64, 7.0F);
    x[3] = comm.rank() == 0 ? std::numeric_limits<float>::infinity() : 1.0F;
    onebit::plan plan(comm, 64);
    EXPECT(plan.allreduce(x, y) == ONEBIT_SKIPPED && y[0] == 7.0F);
    EXPECT(plan.iallreduce(x, y).wait() == ONEBIT_SKIPPED);
  });
}

// Checks that the handle's calls give the same parameters as C's calls.
template <typename Kind, typename Options, typename Create>
static void check_steps_as_in_c(communicator &comm, Create create, const Options &options) {
  const std::size_t n = 600;
  std::vector<float> p = make_values(0, n), q = p, gradient = make_values(comm.rank() + 5, n);
  const std::vector<onebit_tensor_t> tensors = {onebit::tensor(p.data(), gradient.data(), n)};
  const onebit_tensor_t twin = onebit::tensor(q.data(), gradient.data(), n);
  onebit::optimizer optimizer = Kind(comm, tensors, options);
  onebit_optimizer_t c = nullptr;
  EXPECT(create(comm.get(), &twin, 1, &options, &c) == ONEBIT_OK);
  for (int step = 0; step < 6; step++) {
    EXPECT(optimizer.step(0.01F) == ONEBIT_OK && onebit_optimizer_step(c, 0.01F) == ONEBIT_OK);
    EXPECT(p == q);
  }
  onebit_optimizer_destroy(c);
  gradient[0] = std::numeric_limits<float>::quiet_NaN();
  optimizer.begin(0.01F);
  optimizer.ready(0);
  EXPECT(catch_status([&] { optimizer.begin(0.01F); }) == ONEBIT_ERROR_ARGUMENT);
  EXPECT(catch_status([&] { optimizer.step(0.01F); }) == ONEBIT_ERROR_ARGUMENT);
  EXPECT(optimizer.step(0.01F) == ONEBIT_SKIPPED && p == q);
  optimizer.set_gradient(0, nullptr);
  optimizer.set_learning_rate_factor(0, 0.5F);
  optimizer.set_weight_decay(0, 0.1F);
  optimizer.set_beta1(0.95);
  optimizer.set_tag(3);
  EXPECT(catch_status([&] { optimizer.set_beta1(1); }) == ONEBIT_ERROR_ARGUMENT);
  EXPECT(catch_status([&] { optimizer.set_weight_decay(0, -1); }) == ONEBIT_ERROR_ARGUMENT);
  EXPECT(optimizer.step(0.01F) == ONEBIT_OK);
}

static void optimizers_of_each_kind() {
  run_on_ranks(2, [](communicator &comm) {
    onebit::efficient_adam_options efficient;
    efficient.gain = 1.5;
    check_steps_as_in_c<onebit::efficient_adam, onebit_efficient_adam_options_t>(
        comm, onebit_efficient_adam_create, efficient);
    onebit::adam_options adam;
    adam.freeze_step = 2;
    check_steps_as_in_c<onebit::adam, onebit_adam_options_t>(comm, onebit_adam_create, adam);
    onebit::lamb_options lamb;
    lamb.freeze_step = 2;
    check_steps_as_in_c<onebit::lamb, onebit_lamb_options_t>(comm, onebit_lamb_create, lamb);
    onebit::lion_options lion;
    lion.beta2 = 0.98;
    check_steps_as_in_c<onebit::lion, onebit_lion_options_t>(comm, onebit_lion_create, lion);
    check_steps_as_in_c<onebit::momentum, onebit_momentum_options_t>(comm, onebit_momentum_create,
                                                                     onebit::momentum_options());
    check_steps_as_in_c<onebit::zero_one_adam, onebit_zero_one_adam_options_t>(
        comm, onebit_zero_one_adam_create, onebit::zero_one_adam_options());
    adam.beta1 = 2;
    EXPECT(catch_status([&] { onebit::adam(comm, nullptr, 0, adam); }) == ONEBIT_ERROR_ARGUMENT);
  });
}

static void optimizers_tell_and_go_on(const std::string &directory) {
  communicator comm = communicator::self();
  std::vector<float> p = make_values(0, 400), q = p, gradient = make_values(3, 400);
  onebit::momentum first(comm, {onebit::tensor(p.data(), gradient.data(), 400)});
  onebit::momentum second(comm, {onebit::tensor(q.data(), gradient.data(), 400)});
  EXPECT(first.step(0.1F) == ONEBIT_OK && first.step(0.1F) == ONEBIT_OK);
  EXPECT(first.info().steps == 2 && first.loss_scale() == 1);
  std::uint64_t steps = 0;
  EXPECT(first.stage(&steps) == first.info().stage && steps == 2);
  EXPECT(first.statistics().info.steps == 2 && first.statistics(0).count == 400);
  EXPECT(catch_status([&] { first.statistics(1); }) == ONEBIT_ERROR_ARGUMENT);
  const std::string text = first.describe(), json = first.describe(ONEBIT_FORMAT_JSON);
  EXPECT(text.size() > 0 && json.front() == '{' && json.back() == '}');
  EXPECT(first.check_errors() == ONEBIT_OK);
  second.load({first.save_whole()});
  EXPECT(p == q && first.step(0.1F) == ONEBIT_OK && second.step(0.1F) == ONEBIT_OK && p == q);
  EXPECT(catch_status([&] { second.load({{1, 2, 3}}); }) == ONEBIT_ERROR_CHECKPOINT);
  EXPECT(catch_status([&] { second.load_files(std::string("/nowhere")); }) == ONEBIT_ERROR_FILE);
  EXPECT(first.step(0.1F) == ONEBIT_OK && p != q);
  first.save_files(directory);
  second.load_files(directory);
  EXPECT(p == q && second.info().steps == 4);
}

static void outer_steps_as_in_c() {
  run_on_ranks(2, [](communicator &comm) {
    std::vector<float> p(400), x(400);
    onebit::outer_options options;
    options.local_steps = 1;
    options.bits = ONEBIT_OUTER_DENSE;
    onebit::outer outer(comm, {onebit::tensor(p.data(), nullptr, p.size())}, options);
    for (float &value : p)
      value = static_cast<float>(comm.rank() * 2);
    EXPECT(outer.step() == ONEBIT_OK && p == std::vector<float>(400, 1.0F));
    outer.consensus(0, x.data());
    EXPECT(x == p && outer.info().exchanges == 1 && outer.check_errors() == ONEBIT_OK);
    EXPECT(catch_status([&] { outer.consensus(1, x.data()); }) == ONEBIT_ERROR_ARGUMENT);
    options.bits = 3;
    EXPECT(catch_status([&] { onebit::outer(comm, {}, options); }) == ONEBIT_ERROR_ARGUMENT);
    EXPECT(outer.synchronize() == ONEBIT_OK);
    options.bits = 0;
    const communicator alone = communicator::self();
    onebit::outer site(alone, &comm, {onebit::tensor(p.data(), nullptr, p.size())}, options);
    EXPECT(site.step() == ONEBIT_OK && site.sites().sites == 2);
    site.move_to(comm);
    EXPECT(site.synchronize() == ONEBIT_OK && site.sites().site == comm.rank());
  });
  communicator comm = communicator::self(), other = communicator::self();
  std::vector<float> p(400), q(400);
  onebit::outer first(comm, {onebit::tensor(p.data(), nullptr, p.size())});
  onebit::outer second(comm, {onebit::tensor(q.data(), nullptr, q.size())});
  for (std::size_t i = 0; i < p.size(); i++)
    p[i] = static_cast<float>(i);
  EXPECT(first.step() == ONEBIT_OK);
  const std::vector<unsigned char> part = first.save();
  const void *const parts[] = {part.data()};
  const std::size_t bytes[] = {part.size()};
  second.load(parts, bytes, 1);
  second.move_to(other);
  EXPECT(p == q && second.info().steps == 1);
  EXPECT(catch_status([&] { second.load_files(std::string("/nowhere")); }) == ONEBIT_ERROR_FILE);
}

int main(int argc, char **argv) {
  EXPECT(argc == 2); // a directory that does not exist yet
  errors_have_status_and_words();
  handles_move();
  collectives_give_what_c_gives();
  operations_know_their_buffers();
  requests_are_waited_for();
  a_buffer_that_does_not_fit_hangs_nobody();
  what_is_not_finite_is_skipped();
  optimizers_of_each_kind();
  optimizers_tell_and_go_on(argv[1]);
  outer_steps_as_in_c();
  return 0;
}
