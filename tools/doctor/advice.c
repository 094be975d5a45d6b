/* The doctor's words: findings, numbered, and the settings to paste. */
#include <string.h>

#include "tools/doctor/judge.h"

#define SAY(text, ...) doctor_say(text, sizeof(text), __VA_ARGS__)

void doctor_print_findings(FILE *file, const struct doctor_diagnosis *diagnosis) {
  if (diagnosis->count == 0)
    fprintf(file, "\nNo findings.\n");
  else
    fprintf(file, "\n%d finding%s\n", diagnosis->count + diagnosis->more,
            diagnosis->count + diagnosis->more == 1 ? "" : "s");
  for (int i = 0; i < diagnosis->count; i++) {
    const struct doctor_finding *finding = &diagnosis->findings[i];
    fprintf(file, "%2d. %s\n    why: %s\n    do:  %s\n", i + 1, finding->seen, finding->why,
            finding->set);
  }
  if (diagnosis->more)
    fprintf(file, "    ... and %d more\n", diagnosis->more);
}

/* --- Settings ----------------------------------------------------------------------------------*/

enum { WORDS = 256 }; /* a dozen and more names; a longer list ends early */

struct words {
  char names[WORDS];   /* the interface's names, with commas where hosts differ */
  char include[WORDS]; /* for Open MPI: the name, or the subnet */
};

static bool has_name(const char *list, const char *name) {
  size_t length = strlen(name);
  for (const char *at = list; (at = strstr(at, name)); at += length)
    if ((at == list || at[-1] == ',') && (at[length] == '\0' || at[length] == ','))
      return true;
  return false;
}

static void name_interface(const struct doctor_facts *facts, int subnet, struct words *words) {
  const struct doctor_subnet *the = &facts->subnets[subnet];
  char network[DOCTOR_ADDRESS];
  memset(words, 0, sizeof *words);
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *interface =
        doctor_interface_in(&facts->hosts[h], the->network, the->netmask);
    if (interface && !has_name(words->names, interface->name))
      SAY(words->names, "%s%s", words->names[0] ? "," : "", interface->name);
  }
  SAY(words->include, "%s",
      strchr(words->names, ',') ? doctor_network(the->network, the->netmask, network)
                                : words->names);
}

/* Whether every rank can have a core of its own. */
static bool cores_suffice(const struct doctor_facts *facts) {
  for (int h = 0; h < facts->host_count; h++)
    if (facts->hosts[h].ranks > facts->hosts[h].cpus_online)
      return false;
  return true;
}

static void print_open_mpi(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis, const struct words *words) {
  const char *binding = cores_suffice(facts) ? "core" : "none";
  char options[640] = "", variables[640] = "";
  if (diagnosis->set_subnet >= 0) {
    SAY(options, " --mca btl_tcp_if_include %s --mca oob_tcp_if_include %s", words->include,
        words->include);
    SAY(variables, " OMPI_MCA_btl_tcp_if_include=%s OMPI_MCA_oob_tcp_if_include=%s", words->include,
        words->include);
  }
  if (diagnosis->set_yield) {
    SAY(options, " --mca mpi_yield_when_idle 1");
    SAY(variables, " OMPI_MCA_mpi_yield_when_idle=1");
  }
  if (diagnosis->set_streams) {
    SAY(options, " --mca btl_tcp_links %d", diagnosis->set_streams);
    SAY(variables, " OMPI_MCA_btl_tcp_links=%d", diagnosis->set_streams);
  }
  if (diagnosis->set_binding)
    SAY(options, " --bind-to %s", binding);
  fprintf(file, "  mpirun%s ...\n", options);
  if (variables[0])
    fprintf(file, "  export%s    # the same for srun\n", variables);
  if (diagnosis->set_binding)
    fprintf(file, "  srun --cpu-bind=%s ...\n", cores_suffice(facts) ? "cores" : "none");
}

static void print_mpich(FILE *file, const struct doctor_diagnosis *diagnosis,
                        const struct words *words) {
  if (diagnosis->set_subnet >= 0)
    fprintf(file, "  export HYDRA_IFACE=%s FI_TCP_IFACE=%s\n", words->names, words->names);
  if (diagnosis->set_binding)
    fprintf(file, "  mpirun -bind-to core ...\n");
}

static void print_others(FILE *file, const struct doctor_diagnosis *diagnosis,
                         const struct words *words) {
  if (diagnosis->set_subnet >= 0) {
    fprintf(file, "where UCX carries MPI\n  export UCX_NET_DEVICES=%s UCX_TLS=tcp,self,sm\n",
            words->names);
    fprintf(file, "NCCL on the same hosts\n  export NCCL_SOCKET_IFNAME==%s NCCL_IB_DISABLE=1",
            words->names);
  } else
    fprintf(file, "NCCL on the same hosts\n  export");
  if (diagnosis->set_streams)
    fprintf(file, " NCCL_SOCKET_NTHREADS=%d NCCL_NSOCKS_PERTHREAD=1", diagnosis->set_streams);
  fprintf(file, "\n");
}

/* Which setting a kind of finding asks for; NULL: none that can be pasted. */
static const char *setting_of(enum doctor_kind kind) {
  switch (kind) {
  case DOCTOR_SPINNING:
    return "yield";
  case DOCTOR_SAME_CPU:
    return "binding";
  case DOCTOR_WRONG_INTERFACE:
  case DOCTOR_ODD_INTERFACE:
  case DOCTOR_SPREAD:
    return "interface";
  case DOCTOR_STREAMS_HELP:
    return "streams";
  default:
    return NULL;
  }
}

static void print_reasons(FILE *file, const struct doctor_diagnosis *diagnosis) {
  for (int i = 0; i < diagnosis->count; i++) {
    const struct doctor_finding *finding = &diagnosis->findings[i];
    if (setting_of(finding->kind))
      fprintf(file, "  # %s: %s\n", setting_of(finding->kind), finding->seen);
  }
}

void doctor_print_settings(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis) {
  struct words words = {.names = ""};
  bool network = diagnosis->set_subnet >= 0 || diagnosis->set_streams;
  if (!network && !diagnosis->set_yield && !diagnosis->set_binding)
    return;
  if (diagnosis->set_subnet >= 0)
    name_interface(facts, diagnosis->set_subnet, &words);
  fprintf(file, "\nSettings, and what was measured that asks for them\n");
  print_reasons(file, diagnosis);
  fprintf(file, "%s\n", facts->library_name);
  if (facts->library == DOCTOR_OPEN_MPI)
    print_open_mpi(file, facts, diagnosis, &words);
  else if (facts->library == DOCTOR_MPICH)
    print_mpich(file, diagnosis, &words);
  if (network)
    print_others(file, diagnosis, &words);
}
