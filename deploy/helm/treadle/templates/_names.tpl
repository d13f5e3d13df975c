{{/* Names and labels. At most 40 characters, so that "-g63-worker-63" and a hash still fit. */}}
{{- define "treadle.name" -}}
{{- default (ternary .Release.Name (printf "%s-treadle" .Release.Name) (contains "treadle" .Release.Name)) .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "treadle.selector" -}}
app.kubernetes.io/name: treadle
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "treadle.labels" -}}
{{ include "treadle.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* "pod": one pod a group. Else what holds the stages: StatefulSet or LeaderWorkerSet. */}}
{{- define "treadle.layout" -}}
{{- if or (eq (int .Values.parallelism.pipeline) 1) (eq .Values.parallelism.topology "SinglePod") -}}
pod
{{- else -}}
{{ .Values.parallelism.topology }}
{{- end -}}
{{- end -}}

{{- define "treadle.workerPort" -}}7001{{- end -}}

{{- define "treadle.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}
