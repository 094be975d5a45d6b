/* The keys of a tuning file. The bounds are far outside of what machines do: they keep out what
 * would make the model's arithmetic senseless, not what is slow. */
#include "collectives/cost/tuning_keys.h"

#define AT(field) offsetof(struct ob_costs, field)

/* clang-format off */
const struct ob_tuning_key ob_tuning_keys[OB_TUNING_KEYS] = {
  {"hosts", AT(hosts), 1, 1e6, "hosts measured"},
  {"ranks-per-host", AT(ranks_per_host), 0, 1e5, "ranks on each; 0: not the same on all"},
  {"cores-per-host", AT(cores_per_host), 0, 1e5, "cores; 0: as many as ranks"},
  {"cores-shared", AT(cores_shared), 0, 1e5, "cores that all hosts share; 0: none"},
  {"between.latency", AT(between.latency), 0, 10, "seconds, one way"},
  {"between.bandwidth", AT(between.bandwidth), 1, 1e13, "bytes/s of a host, each way"},
  {"between.message", AT(between.message), 0, 1, "seconds of a core, a message"},
  {"between.byte", AT(between.byte), 0, 1e-3, "seconds of a core, a byte"},
  {"inside.latency", AT(inside.latency), 0, 10, "seconds, one way"},
  {"inside.bandwidth", AT(inside.bandwidth), 1, 1e13, "bytes/s of a rank, each way"},
  {"inside.message", AT(inside.message), 0, 1, "seconds of a core, a message"},
  {"inside.byte", AT(inside.byte), 0, 1e-3, "seconds of a core, a byte"},
  {"compress", AT(compress), 0, 1e-3, "seconds of a core, an element"},
  {"reduce", AT(reduce), 0, 1e-3, "seconds of a core, an element"},
  {"reduce-stream", AT(reduce_stream), 0, 1e-3, "seconds of a core, an element and stream"},
  {"apply", AT(apply), 0, 1e-3, "seconds of a core, an element"},
  {"load", AT(load), 0, 1e-3, "seconds of a core, a dense element"},
  {"add", AT(add), 0, 1e-3, "seconds of a core, a dense element and stream"},
  {"convert", AT(convert), 0, 1e-3, "seconds of a core, a dense element"},
  {"call", AT(call), 0, 10, "seconds, a call"},
  {"exchange-efficiency", AT(exchange_efficiency), 0.01, 2, "fitted: part of the bandwidth"},
  {"codec-factor", AT(codec_factor), 0.1, 100, "fitted: in an exchange over alone"},
  {"unhidden", AT(unhidden), 0, 1, "fitted: of the smaller of wire and cores"},
  {"mpi.call", AT(mpi_call), 0, 10, "fitted: seconds, an MPI_Allreduce"},
  {"mpi.round", AT(mpi_round), 0, 10, "fitted: seconds, each of its rounds"},
  {"mpi.efficiency", AT(mpi_efficiency), 0.01, 2, "fitted: part of the bandwidth"},
  {"mpi.byte", AT(mpi_byte), 0, 1e-3, "fitted: seconds of a core, a byte"},
  {"oversubscribed", AT(oversubscribed), 0, 10, "fitted: seconds that a wait takes longer"},
  {"residual", AT(residual), 0, 100, "of the fit: root mean square of log(predicted/measured)"},
};
/* clang-format on */
