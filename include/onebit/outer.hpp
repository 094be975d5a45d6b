/*
 * The outer step for C++14: part of onebit/onebit.hpp, whose rules hold here. onebit/outer.h is the
 * manual, of checkpoints onebit/checkpoint.h.
 */
#ifndef ONEBIT_OUTER_HPP
#define ONEBIT_OUTER_HPP

#include "onebit/onebit.hpp"
#include "onebit/optimizer.hpp"

namespace onebit {

struct outer_options : onebit_outer_options_t {
  outer_options() noexcept : onebit_outer_options_t ONEBIT_OUTER_OPTIONS_INIT {}
};

struct sites_options : onebit_sites_options_t {
  sites_options() noexcept : onebit_sites_options_t ONEBIT_SITES_OPTIONS_INIT {}
};

namespace detail {
inline void destroy_outer(onebit_outer_t outer) { onebit_outer_destroy(outer); }
} // namespace detail

class outer : public handle<onebit_outer_t, detail::destroy_outer> {
public:
  using handle::handle;

  /* Collective over comm: all ranks succeed, or all throw. tensors: copied, the arrays they point
   * to are not and must outlive the outer step. */
  outer(const communicator &comm, const onebit_tensor_t *tensors, std::size_t count,
        const onebit_outer_options_t &options = outer_options()) {
    check(onebit_outer_create(comm.get(), tensors, count, &options, &pointer_));
  }
  outer(const communicator &comm, const std::vector<onebit_tensor_t> &tensors,
        const onebit_outer_options_t &options = outer_options())
      : outer(comm, tensors.data(), tensors.size(), options) {}

  /* An outer step over several sites: between is NULL except on rank 0 of a site. */
  outer(const communicator &site, const communicator *between,
        const std::vector<onebit_tensor_t> &tensors,
        const onebit_outer_options_t &options = outer_options(),
        const onebit_sites_options_t &sites = sites_options()) {
    check(onebit_outer_create_sites(site.get(), between ? between->get() : nullptr, tensors.data(),
                                    tensors.size(), &options, &sites, &pointer_));
  }

  /* ONEBIT_OK, or ONEBIT_SKIPPED: some rank's drift was not finite. */
  onebit_status_t step(double weight = 1) { return check(onebit_outer_step(get(), weight)); }
  onebit_status_t synchronize() { return check(onebit_outer_synchronize(get())); }
  void consensus(std::size_t tensor, float *values) const {
    check(onebit_outer_get_consensus(get(), tensor, values));
  }
  onebit_outer_info_t info() const { return detail::read_info(onebit_outer_get_info, get()); }
  onebit_sites_info_t sites() const { return detail::read_info(onebit_outer_get_sites, get()); }
  /* ONEBIT_OK; or ONEBIT_WARNING, with a message in onebit_last_error. */
  onebit_status_t check_errors() const { return check(onebit_outer_check(get())); }

  /* This rank's part of a checkpoint; allocates it. */
  std::vector<unsigned char> save() const { return detail::save_part(onebit_outer_save, get()); }
  /* Loads the parts of all ranks that saved, by rank. Collective. */
  void load(const void *const *parts, const std::size_t *bytes, int count) {
    check(onebit_outer_load(get(), parts, bytes, count));
  }
  void save_files(const char *directory) const { check(onebit_outer_save_files(get(), directory)); }
  void save_files(const std::string &directory) const { save_files(directory.c_str()); }
  void load_files(const char *directory) { check(onebit_outer_load_files(get(), directory)); }
  void load_files(const std::string &directory) { load_files(directory.c_str()); }

  /* Moves to other ranks, as an optimizer does; of a site, on its other ranks than 0, to NULL. */
  void move_to(std::nullptr_t) { check(onebit_outer_move(get(), nullptr)); }
  void move_to(const communicator &comm) { check(onebit_outer_move(get(), comm.get())); }
  void shrink(communicator &survivors) {
    onebit_comm_t made = nullptr;
    onebit_status_t status = onebit_outer_shrink(get(), &made);
    survivors = communicator(made);
    check(status);
  }
};

} // namespace onebit

#endif
