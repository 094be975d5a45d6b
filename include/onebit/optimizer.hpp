/*
 * Optimizers for C++14: part of onebit/onebit.hpp, whose rules hold here. onebit/optimizer.h is the
 * manual of what they have in common, and the header of each kind that of its options.
 */
#ifndef ONEBIT_OPTIMIZER_HPP
#define ONEBIT_OPTIMIZER_HPP

#include "onebit/onebit.hpp"

namespace onebit {

/* A tensor with the defaults of its other fields. gradient NULL: this rank has none. */
inline onebit_tensor_t tensor(void *parameter, const void *gradient, std::size_t count) noexcept {
  onebit_tensor_t made = {};
  made.parameter = parameter;
  made.gradient = gradient;
  made.count = count;
  return made;
}

namespace detail {
/* The call that makes an optimizer of such options. */
template <typename Options>
using create_optimizer = onebit_status_t (*)(onebit_comm_t, const onebit_tensor_t *, std::size_t,
                                             const Options *, onebit_optimizer_t *);
} // namespace detail

/* The base of all optimizers; make one of the kinds below, which can be moved into this. */
class optimizer : public handle<onebit_optimizer_t, detail::destroy_optimizer> {
public:
  using handle::handle;

  /* Collective. ONEBIT_OK, or ONEBIT_SKIPPED: some rank's gradient was not finite. */
  onebit_status_t step(float learning_rate) {
    return check(onebit_optimizer_step(get(), learning_rate));
  }
  /* The same step in parts: begin, ready for each tensor, step. */
  void begin(float learning_rate) { check(onebit_optimizer_begin(get(), learning_rate)); }
  void ready(std::size_t tensor) { check(onebit_optimizer_ready(get(), tensor)); }

  void set_gradient(std::size_t tensor, const void *gradient) {
    check(onebit_optimizer_set_gradient(get(), tensor, gradient));
  }
  /* Moves to another communicator, with the ranks that are left or have come. Collective over
   * that. */
  void move_to(const communicator &comm) { check(onebit_optimizer_move(get(), comm.get())); }
  /* Moves to a communicator of the remaining ranks when one was lost. `survivors` is not the old
   * one; when this throws it is the latest that was made, from which another call begins. */
  void shrink(communicator &survivors) {
    onebit_comm_t made = nullptr;
    onebit_status_t status = onebit_optimizer_shrink(get(), &made);
    survivors = communicator(made);
    check(status);
  }
  void compare() { check(onebit_optimizer_compare(get())); } /* the ranks' parameters: collective */
  void set_learning_rate_factor(std::size_t tensor, float factor) {
    check(onebit_optimizer_set_learning_rate_factor(get(), tensor, factor));
  }
  void set_weight_decay(std::size_t tensor, float weight_decay) {
    check(onebit_optimizer_set_weight_decay(get(), tensor, weight_decay));
  }
  void set_beta1(double beta1) { check(onebit_optimizer_set_beta1(get(), beta1)); }
  void set_tag(std::uint64_t tag) { check(onebit_optimizer_set_tag(get(), tag)); }
  void take_parameters() { check(onebit_optimizer_take_parameters(get())); }
  void set_compare_interval(std::uint64_t steps) {
    check(onebit_optimizer_set_compare_interval(get(), steps));
  }
  double loss_scale() const {
    double scale = 1;
    check(onebit_optimizer_get_loss_scale(get(), &scale));
    return scale;
  }

  /* The stage of the next step, and the number of steps made, without a pass over the state. */
  onebit_stage_t stage(std::uint64_t *steps = nullptr) const {
    onebit_stage_t stage = ONEBIT_STAGE_WARMUP;
    std::uint64_t made = 0;
    check(onebit_optimizer_get_stage(get(), &stage, steps ? steps : &made));
    return stage;
  }
  onebit_optimizer_info_t info() const {
    return detail::read_info(onebit_optimizer_get_info, get());
  }
  onebit_optimizer_statistics_t statistics() const {
    return detail::read_info(onebit_optimizer_get_statistics, get());
  }
  onebit_tensor_statistics_t statistics(std::size_t tensor) const {
    onebit_tensor_statistics_t statistics = {};
    statistics.size = sizeof statistics;
    check(onebit_optimizer_get_tensor_statistics(get(), tensor, &statistics));
    return statistics;
  }
  /* One line, as text or JSON. Allocates the string. */
  std::string describe(onebit_format_t format = ONEBIT_FORMAT_TEXT) const {
    std::string line(512, '\0');
    std::size_t length = 0;
    check(onebit_optimizer_describe(get(), format, &line[0], line.size(), &length));
    if (length >= line.size()) {
      line.resize(length + 1);
      check(onebit_optimizer_describe(get(), format, &line[0], line.size(), &length));
    }
    line.resize(length);
    return line;
  }
  /* ONEBIT_OK; or ONEBIT_WARNING, with the tensor's place and a message in onebit_last_error. */
  onebit_status_t check_errors(std::size_t *tensor = nullptr) const {
    return check(onebit_optimizer_check(get(), tensor));
  }

  /* Checkpoints: onebit/checkpoint.h. This rank's part; allocates it. Local. */
  std::vector<unsigned char> save() const {
    return detail::save_part(onebit_optimizer_save, get());
  }
  std::vector<unsigned char> save_whole() const {
    return detail::save_part(onebit_optimizer_save_whole, get());
  }
  /* Loads the parts of all ranks that saved, by rank. Collective. */
  void load(const void *const *parts, const std::size_t *bytes, int count) {
    check(onebit_optimizer_load(get(), parts, bytes, count));
  }
  void load(const std::vector<std::vector<unsigned char>> &parts) {
    std::vector<const void *> memory;
    std::vector<std::size_t> bytes;
    try {
      memory.reserve(parts.size());
      bytes.reserve(parts.size());
    } catch (const std::bad_alloc &) { /* the other ranks learn that this one cannot */
      onebit_optimizer_load(get(), nullptr, nullptr, 0);
      throw;
    }
    for (const std::vector<unsigned char> &part : parts) {
      memory.push_back(part.data());
      bytes.push_back(part.size());
    }
    load(memory.data(), bytes.data(), static_cast<int>(parts.size()));
  }
  void save_files(const char *directory) const {
    check(onebit_optimizer_save_files(get(), directory));
  }
  void save_files(const std::string &directory) const { save_files(directory.c_str()); }
  void load_files(const char *directory) { check(onebit_optimizer_load_files(get(), directory)); }
  void load_files(const std::string &directory) { load_files(directory.c_str()); }

protected:
  /* Collective over comm, as all kinds are made: all ranks succeed, or all throw. */
  template <typename Options>
  optimizer(detail::create_optimizer<Options> create, const communicator &comm,
            const onebit_tensor_t *tensors, std::size_t count, const Options &options) {
    check(create(comm.get(), tensors, count, &options, &pointer_));
  }
};

/* The options of each kind with their defaults. */
struct efficient_adam_options : onebit_efficient_adam_options_t {
  efficient_adam_options() noexcept
      : onebit_efficient_adam_options_t ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT {}
};
struct adam_options : onebit_adam_options_t {
  adam_options() noexcept : onebit_adam_options_t ONEBIT_ADAM_OPTIONS_INIT {}
};
struct lamb_options : onebit_lamb_options_t {
  lamb_options() noexcept : onebit_lamb_options_t ONEBIT_LAMB_OPTIONS_INIT {}
};
struct zero_one_adam_options : onebit_zero_one_adam_options_t {
  zero_one_adam_options() noexcept
      : onebit_zero_one_adam_options_t ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT {}
};
struct momentum_options : onebit_momentum_options_t {
  momentum_options() noexcept : onebit_momentum_options_t ONEBIT_MOMENTUM_OPTIONS_INIT {}
};
struct lion_options : onebit_lion_options_t {
  lion_options() noexcept : onebit_lion_options_t ONEBIT_LION_OPTIONS_INIT {}
};

/* An optimizer that `create` makes. tensors: a vector of what tensor() makes, or a pointer and a
 * count; copied, the arrays they point to are not and must outlive the optimizer. */
template <typename Options, typename COptions, detail::create_optimizer<COptions> create>
class optimizer_of : public optimizer {
public:
  optimizer_of() noexcept = default;
  optimizer_of(const communicator &comm, const onebit_tensor_t *tensors, std::size_t count,
               const COptions &options = Options())
      : optimizer(create, comm, tensors, count, options) {}
  optimizer_of(const communicator &comm, const std::vector<onebit_tensor_t> &tensors,
               const COptions &options = Options())
      : optimizer_of(comm, tensors.data(), tensors.size(), options) {}
};
/* Efficient-Adam, the one to begin with: onebit/efficient_adam.h */
using efficient_adam = optimizer_of<efficient_adam_options, onebit_efficient_adam_options_t,
                                    onebit_efficient_adam_create>;
/* 1-bit Adam: onebit/adam.h */
using adam = optimizer_of<adam_options, onebit_adam_options_t, onebit_adam_create>;
/* 1-bit LAMB: onebit/lamb.h */
using lamb = optimizer_of<lamb_options, onebit_lamb_options_t, onebit_lamb_create>;
/* 0/1 Adam: onebit/zero_one_adam.h */
using zero_one_adam = optimizer_of<zero_one_adam_options, onebit_zero_one_adam_options_t,
                                   onebit_zero_one_adam_create>;
/* 1-bit momentum SGD: onebit/momentum.h */
using momentum = optimizer_of<momentum_options, onebit_momentum_options_t, onebit_momentum_create>;
/* Lion in one bit: onebit/lion.h */
using lion = optimizer_of<lion_options, onebit_lion_options_t, onebit_lion_create>;

} // namespace onebit

#endif
