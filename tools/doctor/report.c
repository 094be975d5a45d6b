/* Prints the doctor's report: tables of measurements, findings, and settings to paste. */
#include <string.h>

#include "tools/doctor/doctor.h"

const char *doctor_network(uint32_t address, uint32_t netmask, char text[DOCTOR_ADDRESS]) {
  snprintf(text, DOCTOR_ADDRESS, "%u.%u.%u.%u/%d", address >> 24, address >> 16 & 255,
           address >> 8 & 255, address & 255, __builtin_popcount(netmask));
  return text;
}

/* --- Tables ------------------------------------------------------------------------------------*/

/* The most rows and columns of a table; measurements on further hosts are judged all the same. */
enum { TABLE_HOSTS = 16 };

static int shown(const struct doctor_facts *facts) {
  return facts->host_count < TABLE_HOSTS ? facts->host_count : TABLE_HOSTS;
}

static void print_hosts(FILE *file, const struct doctor_facts *facts) {
  fprintf(
      file,
      "\nRanks; CPUs that other programs use; a hop of a message that goes round the ranks of a "
      "host, in us\n  %-16s %6s %6s %6s %6s %9s\n",
      "host", "ranks", "CPUs", "usable", "others", "hop");
  for (int h = 0; h < shown(facts); h++)
    fprintf(file, "  %-16s %6d %6d %6d %6.1f %9.1f\n", facts->hosts[h].name, facts->hosts[h].ranks,
            facts->hosts[h].cpus_online, doctor_host_cpus(facts, h), facts->hosts[h].others,
            facts->hosts[h].local_hop);
}

static void print_interfaces(FILE *file, const struct doctor_facts *facts) {
  char network[DOCTOR_ADDRESS];
  fprintf(file,
          "\nInterfaces (* virtual: its speed means nothing); MiB that they sent while MPI sent "
          "%.1f MiB\n  %-16s %-12s %-18s %6s %8s %-5s %9s\n",
          (double)facts->bulk / (1 << 20), "host", "interface", "address", "MTU", "Mbit/s", "state",
          "MiB");
  for (int h = 0; h < shown(facts); h++)
    for (int i = 0; i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &facts->hosts[h].interfaces[i];
      fprintf(file, "  %-16s %-12s %-18s %6d %7d%c %-5s %9.2f\n", facts->hosts[h].name, one->name,
              doctor_network(one->address, one->netmask, network), one->mtu, one->speed,
              one->physical ? ' ' : '*', one->up ? "up" : "down", (double)one->sent / (1 << 20));
    }
}

static void print_subnets(FILE *file, const struct doctor_facts *facts) {
  char network[DOCTOR_ADDRESS];
  fprintf(file,
          "\nSubnets that all hosts share; plain TCP in Gbit/s, the fastest pair of hosts\n"
          "  %-20s %9s %9s  of MPI's traffic\n",
          "subnet", "1 stream", "4 streams");
  for (int s = 0; s < facts->subnet_count; s++) {
    const struct doctor_subnet *subnet = &facts->subnets[s];
    fprintf(file, "  %-20s %9.2f %9.2f  %.0f %%%s\n",
            doctor_network(subnet->network, subnet->netmask, network), subnet->one_stream,
            subnet->four_streams, 100 * doctor_part_of(facts, -1, s),
            subnet->one_stream > 0 ? "" : "  no connection: a firewall?");
  }
  if (doctor_used_subnet(facts) < 0)
    fprintf(file, "  MPI's traffic took none of them: the kernel did not count it (RDMA), or the "
                  "hosts are\n  in different subnets; interfaces cannot be judged\n");
}

static void print_matrix(FILE *file, const struct doctor_facts *facts, const char *title,
                         const double *matrix, int digits) {
  fprintf(file, "\n%s\n  %-16s", title, "");
  for (int to = 0; to < shown(facts); to++)
    fprintf(file, " %8.8s", facts->hosts[to].name);
  for (int from = 0; from < shown(facts); from++) {
    fprintf(file, "\n  %-16s", facts->hosts[from].name);
    for (int to = 0; to < shown(facts); to++)
      fprintf(file, " %8.*f", digits, matrix[from * facts->host_count + to]);
  }
  fprintf(file, "\n");
}

void doctor_print_facts(FILE *file, const struct doctor_facts *facts) {
  static const char *const answers[] = {"the library does not say", "no", "yes"};
  fprintf(file, "%d rank%s on %d host%s; %s; ranks yield when idle: %s\n", facts->rank_count,
          facts->rank_count == 1 ? "" : "s", facts->host_count, facts->host_count == 1 ? "" : "s",
          facts->library, answers[facts->ranks[0].yields + 1]);
  print_hosts(file, facts);
  print_interfaces(file, facts);
  if (facts->host_count < 2) {
    fprintf(file, "\nOne host: which interface carries the traffic, the speed of the network, slow "
                  "hosts, streams\nand MTUs cannot be measured. Start ranks on two hosts or more "
                  "for that.\n");
    return;
  }
  print_subnets(file, facts);
  print_matrix(file, facts, "MPI bandwidth in Gbit/s, from row to column", facts->bandwidth, 2);
  print_matrix(file, facts, "MPI round trip in us, median", facts->round_trip, 0);
  if (facts->host_count > TABLE_HOSTS)
    fprintf(file, "  ... and %d more hosts\n", facts->host_count - TABLE_HOSTS);
}

void doctor_print_findings(FILE *file, const struct doctor_diagnosis *diagnosis) {
  int all = diagnosis->count + diagnosis->more;
  if (all == 0)
    fprintf(file, "\nNo findings.\n");
  else
    fprintf(file, "\n%d finding%s\n", all, all == 1 ? "" : "s");
  for (int i = 0; i < diagnosis->count; i++)
    fprintf(file, "%2d. %s\n    why: %s\n    do:  %s\n", i + 1, diagnosis->findings[i].seen,
            diagnosis->findings[i].why, diagnosis->findings[i].advice);
  if (diagnosis->more)
    fprintf(file, "    ... and %d more\n", diagnosis->more);
}

/* --- Settings ----------------------------------------------------------------------------------*/

/* Lists the interface's names, with commas where hosts differ. */
static void list_names(const struct doctor_facts *facts, int subnet, char *names, size_t size) {
  const char *before = "";
  names[0] = '\0';
  for (int h = 0; subnet >= 0 && h < facts->host_count; h++) {
    const char *name = doctor_interface_in(facts, h, subnet)->name;
    const size_t used = strlen(names);
    if (strcmp(name, before) != 0 && !strstr(names, name))
      snprintf(names + used, size - used, "%s%s", used ? "," : "", name);
    before = name;
  }
}

void doctor_print_settings(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis) {
  char names[256], network[DOCTOR_ADDRESS];
  const int subnet = diagnosis->set_subnet;
  if (subnet < 0 && !diagnosis->set_yield && !diagnosis->set_binding && !diagnosis->set_streams)
    return;
  list_names(facts, subnet, names, sizeof names);
  fprintf(file, "\nSettings\n  Open MPI: mpirun");
  if (subnet >= 0) {
    const struct doctor_subnet *in = &facts->subnets[subnet];
    const char *include =
        strchr(names, ',') ? doctor_network(in->network, in->netmask, network) : names;
    fprintf(file, " --mca btl_tcp_if_include %s --mca oob_tcp_if_include %s", include, include);
  }
  fprintf(file, "%s%s%s ...; for srun export OMPI_MCA_NAME=VALUE\n",
          diagnosis->set_yield ? " --mca mpi_yield_when_idle 1" : "",
          diagnosis->set_streams ? " --mca btl_tcp_links 4" : "",
          diagnosis->set_binding ? " --bind-to none" : "");
  if (subnet >= 0)
    fprintf(file,
            "  MPICH: export HYDRA_IFACE=%s FI_TCP_IFACE=%s\n"
            "  where UCX carries MPI: export UCX_NET_DEVICES=%s UCX_TLS=tcp,self,sm\n"
            "  NCCL on the same hosts: export NCCL_SOCKET_IFNAME==%s NCCL_IB_DISABLE=1\n",
            names, names, names, names);
  if (diagnosis->set_streams)
    fprintf(file, "  NCCL: export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=1\n");
}
