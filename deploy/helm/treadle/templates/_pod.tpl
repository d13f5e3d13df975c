{{/* CPUs of a computing pod, rounded up: its limit, else its request; 0: unknown. */}}
{{- define "treadle.cpus" -}}
{{- $resources := .Values.resources -}}
{{- $cpu := (default dict $resources.limits).cpu | default (default dict $resources.requests).cpu | default 0 | toString -}}
{{- $milli := ternary ($cpu | trimSuffix "m" | float64) (mulf ($cpu | float64) 1000) (hasSuffix "m" $cpu) -}}
{{ divf $milli 1000 | ceil | int }}
{{- end -}}

{{/* Flags of the values' server map, such as maxBatchSize: 8 as --max-batch-size=8. A server
     counts a container's CPUs as the node's, so it is told its threads, and where there are GPUs
     it is to fail without them. The master of a pipeline computes nothing. Argument: dict of root, master. */}}
{{- define "treadle.flags" -}}
{{- $flags := deepCopy .root.Values.server -}}
{{- $cpus := include "treadle.cpus" .root | int -}}
{{- if .master -}}
{{- $flags = omit $flags "threads" "pinThreads" -}}
{{- else if and (not (hasKey $flags "threads")) $cpus -}}
{{- $_ := set $flags "threads" $cpus -}}
{{- end -}}
{{- if and (not (hasKey $flags "device")) (gt (int .root.Values.gpu.count) 0) -}}
{{- $_ := set $flags "device" "cuda" -}}
{{- end -}}
{{- range $key := keys $flags | sortAlpha }}
{{- $value := get $flags $key }}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) }}
{{- $value = int64 $value }}
{{- end }}
- {{ printf "--%s=%v" (kebabcase $key) $value | quote }}
{{- end }}
{{- range .root.Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "treadle.logging" -}}
{{- with .Values.logging -}}
- --log-format={{ .format }}
- --log-level={{ .level }}
{{- end -}}
{{- end -}}

{{/* What every pod has. Argument: dict of root, graceSeconds. */}}
{{- define "treadle.podCommon" -}}
{{- $v := .root.Values -}}
serviceAccountName: {{ $v.serviceAccountName }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .graceSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $v.securityContext.runAsUser | int64 }}
  runAsGroup: {{ $v.securityContext.runAsGroup | int64 }}
  seccompProfile:
    type: RuntimeDefault
{{- with $v.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- with get $v $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "treadle.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The Secret that proves master and workers to each other: the given one, or the chart's own.
     Empty where all stages are in one pod, or a certificate does that. */}}
{{- define "treadle.controlSecret" -}}
{{- $v := .Values -}}
{{- if and (ne (include "treadle.layout" .) "pod") (or $v.controlSecret.secret (not $v.controlTls.secret)) -}}
{{- default (printf "%s-control" (include "treadle.name" .)) $v.controlSecret.secret -}}
{{- end -}}
{{- end -}}

{{/* Secrets that a pod mounts, name to Secret. Argument: dict of root, server (whether clients
     reach it). */}}
{{- define "treadle.secrets" -}}
{{- $v := .root.Values -}}
{{- $secrets := dict "control-tls" $v.controlTls.secret "control-secret" (include "treadle.controlSecret" .root) -}}
{{- if .server -}}
{{- $secrets = merge $secrets (dict "tls" $v.tls.secret "api-keys" $v.apiKeys.secret "metrics-tls" $v.metricsTls.secret "metrics-token" $v.metricsToken.secret) -}}
{{- end -}}
{{ toYaml $secrets }}
{{- end -}}

{{/* Volumes of a pod. Argument: dict of root, model (whether it reads the model), server (whether
     clients reach it). */}}
{{- define "treadle.volumes" -}}
{{- $v := .root.Values -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $v.shmSize }}
- name: tmp
  emptyDir: {}
{{- if .model }}
{{- if eq $v.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ $v.model.pvc.claim }}
    readOnly: true
{{- else if eq $v.model.source "imageVolume" }}
- name: model
  image:
    reference: {{ $v.model.imageVolume.reference }}
    pullPolicy: {{ $v.model.imageVolume.pullPolicy }}
{{- else if eq $v.model.source "url" }}
- name: model
  emptyDir:
    sizeLimit: {{ $v.model.url.sizeLimit }}
{{- end }}
{{- end }}
{{- range $name, $secret := include "treadle.secrets" . | fromYaml }}
{{- if $secret }}
- name: {{ $name }}
  secret:
    secretName: {{ $secret }}
{{- end }}
{{- end }}
{{- with $v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "treadle.mounts" -}}
{{- $v := .root.Values -}}
- name: shm
  mountPath: /dev/shm
- name: tmp
  mountPath: /tmp
{{- if and .model (ne $v.model.source "container") }}
- name: model
  mountPath: {{ $v.model.mountPath }}
  readOnly: true
{{- end }}
{{- range $name, $secret := include "treadle.secrets" . | fromYaml }}
{{- if $secret }}
- name: {{ $name }}
  mountPath: /etc/treadle/{{ $name }}
  readOnly: true
{{- end }}
{{- end }}
{{- with $v.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Fetches the model and checks it. The secret does not appear on a command line. */}}
{{- define "treadle.fetch" -}}
{{- $m := .Values.model -}}
- name: fetch-model
  image: {{ include "treadle.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [bash, -euo, pipefail, -c]
  args:
    - |
      good() { echo "$SHA256  $1" | sha256sum --check --status 2>/dev/null; }
      [ ! -f "$FILE" ] || ! good "$FILE" || exit 0
      mkdir -p "${FILE%/*}"
      { [ -z "${AUTHORIZATION:-}" ] || printf 'header = "Authorization: %s"\n' "$AUTHORIZATION"; } |
        curl --config - --fail --silent --show-error --location --retry 5 --output "$FILE.part" "$URL"
      good "$FILE.part" || { echo "the sha256 of $URL is not model.url.sha256 ($SHA256)" >&2; rm "$FILE.part"; exit 1; }
      mv "$FILE.part" "$FILE"
  env:
    - name: URL
      value: {{ $m.url.url | quote }}
    - name: SHA256
      value: {{ $m.url.sha256 | quote }}
    - name: FILE
      value: {{ $m.path | quote }}
    {{- with $m.url.authorizationSecret }}
    {{- if .name }}
    - name: AUTHORIZATION
      valueFrom:
        secretKeyRef:
          name: {{ .name }}
          key: {{ .key }}
    {{- end }}
    {{- end }}
  resources:
    requests:
      cpu: 100m
      memory: 64Mi
    limits:
      memory: 256Mi
  securityContext:
    {{- include "treadle.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: {{ $m.mountPath }}
    - name: tmp
      mountPath: /tmp
{{- end -}}

{{- define "treadle.gpus" -}}
{{- $stages := eq (include "treadle.layout" .) "pod" | ternary 1 (int .Values.parallelism.pipeline) -}}
{{ div .Values.gpu.count $stages }}
{{- end -}}

{{/* Resources with this pod's GPUs. Argument: dict of root, resources, gpus. */}}
{{- define "treadle.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $limits := merge (dict .root.Values.gpu.resource (int .gpus)) (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* A gRPC probe. Argument: dict of port, probe. */}}
{{- define "treadle.probe" -}}
grpc:
  port: {{ .port }}
  {{- with .probe.service }}
  service: {{ . }}
  {{- end }}
periodSeconds: {{ .probe.periodSeconds }}
timeoutSeconds: {{ .probe.timeoutSeconds }}
failureThreshold: {{ .failureThreshold }}
{{- end -}}

{{/* preStop + drain + slack. */}}
{{- define "treadle.graceSeconds" -}}
{{- with .Values.drain -}}
{{- default (add .beforeSeconds .timeoutSeconds .slackSeconds) (int64 $.Values.terminationGracePeriodSeconds) -}}
{{- end -}}
{{- end -}}
