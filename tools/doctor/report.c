/* The doctor's tables: what was measured, before what is made of it. */
#include <string.h>

#include "tools/doctor/doctor.h"

/* Rows and columns of a table at most; what is measured on further hosts is judged all the same. */
enum { TABLE_HOSTS = 16 };

static int shown(const struct doctor_facts *facts) {
  return facts->host_count < TABLE_HOSTS ? facts->host_count : TABLE_HOSTS;
}

static void print_more(FILE *file, const struct doctor_facts *facts) {
  if (facts->host_count > TABLE_HOSTS)
    fprintf(file, "  ... and %d more hosts\n", facts->host_count - TABLE_HOSTS);
}

static void print_time(FILE *file, double time) {
  if (time > 0)
    fprintf(file, " %9.1f", time);
  else
    fprintf(file, " %9s", "-");
}

/* "0-3,8", or as much of it as fits. */
static const char *cpu_list(const uint64_t *cpus, char *text, size_t room) {
  size_t used = 0;
  text[0] = '\0';
  for (int cpu = 0; cpu < 64 * DOCTOR_CPU_WORDS && used + 12 < room; cpu++) {
    int last = cpu;
    if (!(cpus[cpu / 64] >> cpu % 64 & 1))
      continue;
    while (last + 1 < 64 * DOCTOR_CPU_WORDS && (cpus[(last + 1) / 64] >> (last + 1) % 64 & 1))
      last++;
    used += (size_t)snprintf(text + used, room - used, "%s%d", used ? "," : "", cpu);
    if (last > cpu)
      used += (size_t)snprintf(text + used, room - used, "-%d", last);
    cpu = last;
  }
  return text;
}

static void print_ranks(FILE *file, const struct doctor_facts *facts) {
  int yields = facts->ranks[0].yields;
  fprintf(file, "%s; ranks yield when idle: %s\n", facts->library_name,
          yields > 0    ? "yes"
          : yields == 0 ? "no"
                        : "the library does not say");
  fprintf(file,
          "\nRanks; a hop of a message that goes round the ranks of a host, in us\n"
          "  %-16s %6s %6s %6s %9s  %s\n",
          "host", "ranks", "CPUs", "usable", "hop", "first rank's CPUs");
  for (int h = 0; h < shown(facts); h++) {
    const struct doctor_host *host = &facts->hosts[h];
    char list[64] = "";
    for (int r = facts->rank_count - 1; r >= 0; r--)
      if (facts->ranks[r].host == h)
        cpu_list(facts->ranks[r].cpus, list, sizeof list);
    fprintf(file, "  %-16s %6d %6d %6d", host->name, host->ranks, host->cpus_online,
            doctor_host_cpus(facts, h));
    print_time(file, host->local_hop);
    fprintf(file, "  %s\n", list);
  }
  print_more(file, facts);
  if (facts->hop_all > 0)
    fprintf(file,
            "  a hop between %s and %s, all others asleep: %.1f us; round all hosts: %.1f us\n",
            facts->hosts[0].name, facts->hosts[1].name, facts->hop_two, facts->hop_all);
}

static void print_interface(FILE *file, const struct doctor_interface *interface) {
  char network[DOCTOR_ADDRESS], address[DOCTOR_ADDRESS], speed[16] = "-";
  doctor_network(interface->address, interface->netmask, network);
  if (interface->speed > 0)
    snprintf(speed, sizeof speed, "%d%s", interface->speed, interface->physical ? "" : "*");
  fprintf(file, " %-12s %-15s %3s %6d %8s %-5s", interface->name,
          doctor_address(interface->address, address), strchr(network, '/'), interface->mtu, speed,
          interface->up ? "up" : "down");
}

static void print_interfaces(FILE *file, const struct doctor_facts *facts) {
  fprintf(file,
          "\nInterfaces; bytes that they sent while MPI sent %.1f MiB to the next host\n"
          "  %-16s %-12s %-15s %3s %6s %8s %-5s %9s %8s\n",
          (double)facts->bulk / (1 << 20), "host", "interface", "address", "net", "MTU", "Mbit/s",
          "state", "MiB", "a packet");
  for (int h = 0; h < shown(facts); h++)
    for (int i = 0; i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *interface = &facts->hosts[h].interfaces[i];
      fprintf(file, "  %-16s", facts->hosts[h].name);
      print_interface(file, interface);
      fprintf(file, " %9.2f", (double)interface->sent / (1 << 20));
      if (interface->packets > 0)
        fprintf(file, " %8.0f", (double)interface->sent / (double)interface->packets);
      fprintf(file, "\n");
    }
  print_more(file, facts);
  fprintf(file, "  * a virtual interface: its speed means nothing\n");
}

static void print_subnets(FILE *file, const struct doctor_facts *facts) {
  fprintf(file,
          "\nSubnets that all hosts share; plain TCP in Gbit/s, the fastest pair of hosts\n"
          "  %-20s %9s %9s %9s\n",
          "subnet", "1 stream", "2 streams", "4 streams");
  for (int s = 0; s < facts->subnet_count; s++) {
    const struct doctor_subnet *subnet = &facts->subnets[s];
    char network[DOCTOR_ADDRESS];
    fprintf(file, "  %-20s", doctor_network(subnet->network, subnet->netmask, network));
    for (int i = 0; i < DOCTOR_STREAMS; i++)
      fprintf(file, " %9.2f", subnet->rate[i]);
    if (doctor_part_of(facts, -1, s) >= 0.01)
      fprintf(file, "  %.0f %% of MPI's traffic", 100 * doctor_part_of(facts, -1, s));
    fprintf(file, "%s\n", subnet->rate[0] > 0 ? "" : "  no connection: a firewall?");
  }
  if (facts->subnet_count == 0)
    fprintf(file, "  none\n");
  if (doctor_used_subnet(facts) < 0)
    fprintf(file, "  MPI's traffic took none of them: the kernel did not count it (RDMA), or the "
                  "hosts are\n  in different subnets; interfaces cannot be judged\n");
  if (facts->message_streams)
    fprintf(file, "  MPI: %.2f from one rank, %.2f from %d ranks at once\n", facts->one_stream,
            facts->many_streams, facts->message_streams);
}

static void print_matrix(FILE *file, const struct doctor_facts *facts, const char *title,
                         const double *matrix, int digits) {
  int hosts = facts->host_count, columns = shown(facts);
  fprintf(file, "\n%s\n  %-16s", title, "");
  for (int to = 0; to < columns; to++)
    fprintf(file, " %8.8s", facts->hosts[to].name);
  fprintf(file, "\n");
  for (int from = 0; from < columns; from++) {
    fprintf(file, "  %-16s", facts->hosts[from].name);
    for (int to = 0; to < columns; to++)
      if (matrix[from * hosts + to] > 0)
        fprintf(file, " %8.*f", digits, matrix[from * hosts + to]);
      else
        fprintf(file, " %8s", "-");
    fprintf(file, "\n");
  }
  print_more(file, facts);
}

void doctor_print_facts(FILE *file, const struct doctor_facts *facts) {
  fprintf(file, "%d rank%s on %d host%s; ", facts->rank_count, facts->rank_count == 1 ? "" : "s",
          facts->host_count, facts->host_count == 1 ? "" : "s");
  print_ranks(file, facts);
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
}
